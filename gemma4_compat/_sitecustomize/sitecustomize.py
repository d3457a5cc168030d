"""Python imports this at its start, as ``gemma4-compat run`` puts this folder on PYTHONPATH.

It imports gemma4_compat, and then the ``sitecustomize`` that Python would import without this one.
Every Python that the program starts runs this, also Python 2 and one without gemma4_compat: so it
has no newer syntax, and it does not fail.
"""

import os
import sys

_before = set(sys.modules)
_other_folders = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
_is_on_path = len(_other_folders) < len(sys.path)
# The program's sys.path is as it would be without this folder.
sys.path[:] = _other_folders
try:
    import gemma4_compat  # noqa: F401
except Exception as error:  # gemma4_compat or wrapt is missing, or this Python is too old
    for _name in set(sys.modules) - _before:
        if _name.partition(".")[0] == "gemma4_compat":
            del sys.modules[_name]
    _strict = os.environ.get("GEMMA4_COMPAT_STRICT", "").strip().lower()
    if _strict in ("1", "on", "true", "yes") and sys.stderr:
        _reason = type(error).__name__ + ": " + str(error)
        _python = str(sys.executable)
        sys.stderr.write(
            "gemma4-compat: " + _python + " runs without the patches: " + _reason + "\n"
        )

if _is_on_path:  # else the import below would import this file again
    # Python 2 deletes the variables of a module that nothing refers to.
    _this = sys.modules.pop(__name__, None)
    # Where no other exists, this raises the ImportError that Python's site module expects.
    import sitecustomize  # noqa: F401
