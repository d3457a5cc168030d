"""Build a report for an upstream issue, without private data."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

from .. import __version__
from ..engine.gate import evaluate
from ..engine.status import State
from ..errors import InputError
from ..files import checkpoint
from ..files.checkpoint import INDEX, WEIGHTS, Location, is_in, with_repository
from ..files.hub import Repository, short_name
from ..machine.host_memory import machine_memory
from ..results.result import Result
from ..results.text import plural, size
from ..versions import WITH_TORCH
from .adapter import inspect_adapter
from .device_map import check_device_map

REPORTED = (
    *WITH_TORCH, "tokenizers", "safetensors", "huggingface_hub", "trl", "kernels", "triton",
)  # fmt: skip
#: account names that identify nobody
_NOBODY = {"root", "user", "admin", "administrator", "ubuntu", "localhost", "runner"}
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE|DSN|WEBHOOK", re.IGNORECASE)
_PATHS = (
    # The last component is kept.  URLs, "4/8-bit" and the like are not paths.
    r"(?<![\w:/.~\\])(?:~|\.{1,2})?/{1,2}(?:[^\s/\"'`,;()\[\]<>]+/)+([^\s/\"'`,;()\[\]<>]*)",
    # Python's own messages double the backslashes.
    r"(?<![\w?(])[A-Za-z]:[\\/]+(?:[^\\/\"'\n]+[\\/]+)*([^\\/\s\"']*)",
    r"(?<![\w\\])\\{2,}(?:[^\\\"'\n]+\\+)+([^\\\s\"']*)",
)
_ONLY_A_PATH = (
    r"\A(?:(?:~|\.{1,2})?[/\\][^\n]*|[A-Za-z]:[\\/][^\n]*|[^\s/:()]+(?:/[^\s/()]+){2,}/?)\Z"
)


@dataclass(frozen=True)
class Report(Result):
    """The machine, the libraries, the patches, and the model, map or adapter; all plain data.

    ``system``, ``libraries`` and ``model``, a checkpoint, map names of facts to texts.  ``state``
    is the verdict on the patches, and ``patches`` maps names to state and reason.  ``device_map``
    is a checked map and ``adapter`` an adapter, or why they cannot be inspected here.
    """

    system: Mapping[str, str]
    libraries: Mapping[str, str]
    state: str
    patches: Mapping[str, Mapping[str, str]]
    model: Mapping[str, str] | None
    device_map: Mapping[str, Any] | None
    adapter: Mapping[str, Any] | None

    @property
    def ok(self) -> bool:
        """Always True: a report has no verdict."""
        return True

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _lines(self) -> Iterator[str]:
        """Markdown."""
        yield from ("### System", "")
        yield from _facts({**self.system, **self.libraries})
        yield from ("", "### Patches of gemma4_compat", "", self.state, "")
        by_state: dict[str, list[str]] = {}
        for name, patch in self.patches.items():
            by_state.setdefault(patch["state"], []).append(name)
        for state, names in by_state.items():
            yield f"- {state} ({len(names)}): {', '.join(names)}"
            if state in (State.FAILED.value, State.DRIFTED.value):
                yield from (f"  - {name}: {self.patches[name]['reason']}" for name in names)
        if self.model is not None:
            yield from ("", f"### Model: {self.model['name']}", "")
            yield from _facts(self.model)
        for title, data in (("Device map", self.device_map), ("Adapter", self.adapter)):
            if data is not None:
                yield from ("", f"### {title}", "", "```text", data["text"], "```")


def build_report(
    model: Location | None = None,
    adapter: Location | None = None,
    device_map: Mapping[str, Any] | None = None,
) -> Report:
    """Build a report to paste into an issue; its ``str()`` is Markdown.

    Paths are reduced to their last component.  User name, host name, home folder and the values of
    environment variables that look like secrets are removed everywhere.

    Args:
        model: a checkpoint's folder or Hub id, of which only ``config.json`` and the headers of the
            weights are read.
        adapter: an adapter's folder, Hub id or safetensors file; only headers are read.
        device_map: a device map to check against the model.

    Raises:
        InputError: a file, folder or repository is missing or damaged.
        InputError: the device map is invalid, or given without a model.
    """
    from .. import status

    if device_map is not None and model is None:
        raise InputError("a device map is checked against a model: give the model too")
    model, adapter = with_repository(model), with_repository(adapter)
    clean = _Private([each for each in (model, adapter) if each is not None]).clean
    patches = status(import_targets=True)

    def inspected(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        try:
            result = clean(function(*arguments))
            return {**result.as_dict(), "text": str(result)}
        except Exception as error:
            if patches.ok and not isinstance(error, ImportError):
                raise
            # Whoever has libraries that do not work needs a report most.
            return {"text": clean(f"{type(error).__name__}: {error}")}

    return Report(
        device_map=None if device_map is None else inspected(check_device_map, model, device_map),
        adapter=None if adapter is None else inspected(inspect_adapter, adapter, model),
        system=clean(_system()),
        libraries=clean(_libraries()),
        state=clean("\n".join([patches.verdict, *patches.advice])),
        patches=clean({e.name: {"state": e.state.value, "reason": e.reason} for e in patches}),
        model=None if model is None else clean(_checkpoint(checkpoint.located(model))),
    )


# -- private data ---------------------------------------------------------------------------------


class _Private:
    """Removes what identifies the user and the machine from texts."""

    def __init__(self, named: Iterable[Location]) -> None:
        # A Hub id names an account, too.
        exact = {str(each): short_name(str(each)) for each in named if isinstance(each, Repository)}
        for path in (Path(each) for each in named if not isinstance(each, Repository)):
            # Path.resolve raises where links lead in a circle.
            for form in {str(path), str(path.absolute()), os.path.realpath(path)}:
                if os.path.basename(form) != form:  # "." would match everywhere
                    exact[form] = path.absolute().name
        exact |= dict.fromkeys(_homes(), "~")
        secrets = {v for name, v in os.environ.items() if _SECRET.search(name) and len(v) >= 8}
        #: patterns, and what replaces them, in this order
        self.steps: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
            (r"file://", ""),
            *((re.escape(secret), "<secret>") for secret in _longest_first(secrets)),
            (r"\bhf_[A-Za-z0-9]{8,}", "<secret>"),
            *(
                (rf"(?<![\w/\\]){re.escape(path)}(?!\w)", exact[path].replace("\\", r"\\"))
                for path in _longest_first(exact)
            ),
            (_ONLY_A_PATH, lambda match: re.split(r"[/\\]", match[0].rstrip("/\\"))[-1]),
            *((path, lambda match: match[1] or "<path>") for path in _PATHS),
            *(
                (rf"(?i)(?<![^\W_]){re.escape(name)}(?![^\W_])", instead)
                for name, instead in _names()
            ),
        ]

    def clean(self, value: Any) -> Any:
        """The same structure with clean texts; keys are not changed.

        Call it before text is wrapped: wrapping may break a name that contains a space.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self.clean(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.clean, value))
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **self.clean(vars(value)))
        return value

    def text(self, text: str) -> str:
        for pattern, instead in self.steps:
            text = re.sub(pattern, instead, text)
        return text


def _longest_first(texts: Iterable[str]) -> list[str]:
    """Paths inside the home folder come before the home folder."""
    return sorted(texts, key=len, reverse=True)


def _homes() -> Iterator[str]:
    homes = {os.path.expanduser("~"), os.environ.get("HOME"), os.environ.get("USERPROFILE")}
    for home in homes - {None, "", "~", "/"}:
        yield str(home)
        yield os.path.realpath(str(home))


def _names() -> Iterator[tuple[str, str]]:
    users = {os.environ.get(name) for name in ("USER", "LOGNAME", "USERNAME")}
    users |= {os.path.basename(home.rstrip("/\\")) for home in _homes()}
    with contextlib.suppress(OSError, KeyError, ImportError):  # the account has no name
        users.add(getpass.getuser())
    hosts = {os.environ.get("HOSTNAME"), os.environ.get("COMPUTERNAME"), platform.node()}
    hosts |= {(host or "").partition(".")[0] for host in hosts}
    for names, instead in ((users, "<user>"), (hosts, "<host>")):
        for name in _longest_first(filter(None, names)):
            if len(name) > 1 and name.lower() not in _NOBODY:
                yield name, instead


# -- the machine ----------------------------------------------------------------------------------


def _system() -> dict[str, str]:
    facts = {
        "OS": platform.platform(),
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "CPU": f"{platform.machine()}, {plural(os.cpu_count() or 0, 'core')}",
    }
    gpus = {}
    with contextlib.suppress(Exception):  # PyTorch is missing or broken
        import torch

        facts["CPU"] += f", {torch.backends.cpu.get_cpu_capability()}"
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            capability = f"capability {gpu.major}.{gpu.minor}"
            gpus[f"GPU {index}"] = f"{gpu.name}, {size(gpu.total_memory)}, {capability}"
    with contextlib.suppress(ImportError):  # accelerate is not installed
        facts["memory"] = size(machine_memory())
    if (driver := _driver()) is not None:
        facts["NVIDIA driver"] = driver
    return {**facts, **(gpus or {"GPU": "none that PyTorch sees"})}


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except FileNotFoundError:
        return None
    except (OSError, subprocess.SubprocessError):
        return "nvidia-smi fails"
    return next(iter(ran.stdout.split()), None)


def _libraries() -> dict[str, str]:
    found = evaluate(REPORTED).versions
    versions = {name: found.get(name, "not installed") or "unknown version" for name in REPORTED}
    torch = sys.modules.get("torch")
    if torch is not None:  # with the build, as in 2.13.0+cu130
        versions["torch"] = str(torch.__version__)
    return {"gemma4_compat": __version__, **versions}


# -- the model ------------------------------------------------------------------------------------


def _checkpoint(model_dir: Path | Repository) -> dict[str, str]:
    config = checkpoint.read_config(model_dir)
    text = config.get("text_config") or config
    path = model_dir if isinstance(model_dir, Repository) else model_dir.absolute()
    classes = ", ".join(config.get("architectures") or ())
    written_by = config.get("transformers_version")
    facts = {
        "name": short_name(str(path)),
        "class": f"{classes} (model_type {config['model_type']})",
        "layers": str(text.get("num_hidden_layers")),
        "dtype": f"{config.get('dtype')}, written by transformers {written_by}",
        "weights": "no safetensors files in the folder",
    }
    if shared := text.get("num_kv_shared_layers"):
        facts["layers"] += f", {shared} of them share keys and values"
    if quantized := config.get("quantization_config"):
        facts["already quantized"] = str(quantized.get("quant_method"))
    if is_in(model_dir, INDEX) or is_in(model_dir, WEIGHTS):
        headers = checkpoint.weight_headers(model_dir)
        entries = [entry for header in headers for entry in header.values()]
        files = f"{plural(len(entries), 'tensor')} in {plural(len(headers), 'file')}"
        facts["weights"] = f"{files}, {size(sum(entry.bytes for entry in entries))}"
    return facts


def _facts(facts: Mapping[str, str]) -> Iterator[str]:
    return (f"- {name}: {fact}" for name, fact in facts.items())
