"""Build a report for an upstream issue, without private data."""

from __future__ import annotations

import contextlib
import getpass
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from .. import __version__
from ..engine.gate import installed_version
from ..engine.status import State
from ..errors import InputError
from ..model.files import (
    INDEX,
    WEIGHTS,
    Location,
    is_in,
    located,
    read_config,
    weight_headers,
    with_repository,
)
from ..model.host_memory import machine_memory
from ..model.hub import Repository, short_name
from ..model.parts import PARTS
from ..model.sizes import TensorSize
from ..result import Result
from ..text import plural, size
from ..versions import WITH_TORCH

#: not listed unless installed
_OPTIONAL = ("huggingface_hub", "trl", "kernels", "triton", "deepspeed")
REPORTED = (*WITH_TORCH, "tokenizers", "safetensors", *_OPTIONAL)
#: account names that identify nobody
_NOBODY = {"root", "user", "admin", "administrator", "ubuntu", "localhost", "runner"}
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE|DSN|WEBHOOK", re.IGNORECASE)
_PATHS = (
    # The last component is kept.  URLs, "4/8-bit" and the like are not paths.
    re.compile(
        r"(?<![\w:/.~\\])(?:~|\.{1,2})?/{1,2}(?:[^\s/\"'`,;()\[\]<>]+/)+([^\s/\"'`,;()\[\]<>]*)"
    ),
    # Python's own messages double the backslashes.
    re.compile(r"(?<![\w?(])[A-Za-z]:[\\/]+(?:[^\\/\"'\n]+[\\/]+)*([^\\/\s\"']*)"),
    re.compile(r"(?<![\w\\])\\{2,}(?:[^\\\"'\n]+\\+)+([^\\\s\"']*)"),
)
_ONLY_A_PATH = re.compile(
    r"(?:~|\.{1,2})?[/\\][^\n]*|[A-Za-z]:[\\/][^\n]*|[^\s/:()]+(?:/[^\s/()]+){2,}/?"
)


@dataclass(frozen=True)
class Report(Result):
    """The machine, the libraries, the patches, and the model, map or adapter; all plain data.

    ``libraries`` maps names to versions, or to ``None`` if not installed.  ``patches`` maps names
    to state and reason.  ``model`` describes a checkpoint, ``device_map`` a checked map and
    ``adapter`` an adapter.
    """

    system: Mapping[str, str]
    gpus: tuple[Mapping[str, Any], ...]
    libraries: Mapping[str, str | None]
    patches: Mapping[str, Mapping[str, str]]
    model: Mapping[str, Any] | None
    device_map: Mapping[str, Any] | None
    adapter: Mapping[str, Any] | None

    @property
    def ok(self) -> bool:
        """Always True: a report has no verdict."""
        return True

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """Markdown."""
        return "\n".join(_markdown(self))


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
        InputError: transformers does not know the model, or the device map is invalid.
        InputError: a device map is given without a model.
    """
    from .. import status

    if device_map is not None and model is None:
        raise InputError("a device map is checked against a model: give the model too")
    model, adapter = with_repository(model), with_repository(adapter)
    clean = _Private([each for each in (model, adapter) if each is not None]).clean
    patches = status(import_targets=True)
    described = mapped = fits = None
    if model is not None:
        described = _checkpoint(located(model))
    if model is not None and device_map is not None:
        from .device_map import check_device_map

        mapped = _as_data(clean(check_device_map(model, device_map)))
    if adapter is not None:
        from .adapter import inspect_adapter

        fits = _as_data(clean(inspect_adapter(adapter, model)))
    return Report(
        system=clean(_system()),
        gpus=tuple(clean(list(_gpus()))),
        libraries=clean(_libraries()),
        patches=clean({e.name: {"state": e.state.value, "reason": e.reason} for e in patches}),
        model=clean(described),
        device_map=mapped,
        adapter=fits,
    )


def _as_data(result: Any) -> dict[str, Any]:
    return {**result.as_dict(), "text": str(result)}


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
        for home in _homes():
            exact[home] = "~"
        # The longest first: paths inside the home folder before the home folder.
        self.exact = [
            (re.compile(rf"(?<![\w/\\]){re.escape(path)}(?!\w)"), exact[path])
            for path in sorted(exact, key=len, reverse=True)
        ]
        secrets = {value for name, value in os.environ.items() if _SECRET.search(name)}
        self.secrets = sorted((s for s in secrets if len(s) >= 8), key=len, reverse=True)
        self.names = [
            (re.compile(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", re.IGNORECASE), instead)
            for name, instead in _names()
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
            return replace(
                value, **{f.name: self.clean(getattr(value, f.name)) for f in fields(value)}
            )
        return value

    def text(self, text: str) -> str:
        text = text.replace("file://", "")
        for secret in self.secrets:
            text = text.replace(secret, "<secret>")
        text = re.sub(r"\bhf_[A-Za-z0-9]{8,}", "<secret>", text)
        for pattern, instead in self.exact:
            text = _replaced(pattern, instead, text)
        if _ONLY_A_PATH.fullmatch(text):  # it may contain spaces
            text = re.split(r"[/\\]", text.rstrip("/\\"))[-1]
        for pattern in _PATHS:
            text = pattern.sub(lambda match: match[1] or "<path>", text)
        for pattern, instead in self.names:
            text = _replaced(pattern, instead, text)
        return text


def _replaced(pattern: re.Pattern[str], instead: str, text: str) -> str:
    """``re.sub`` with ``instead`` taken literally, backslashes included."""
    return pattern.sub(lambda _: instead, text)


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
        for name in sorted(filter(None, names), key=len, reverse=True):
            if len(name) > 1 and name.lower() not in _NOBODY:
                yield name, instead


# -- the machine ----------------------------------------------------------------------------------


def _system() -> dict[str, str]:
    facts = {
        "OS": platform.platform(),
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "CPU": f"{platform.machine()}, {plural(os.cpu_count() or 0, 'core')}",
    }
    if (torch := _torch()) is not None:
        facts["CPU"] += f", {torch.backends.cpu.get_cpu_capability()}"
    with contextlib.suppress(ImportError):  # accelerate is not installed
        facts["memory"] = size(machine_memory())
    if (driver := _driver()) is not None:
        facts["NVIDIA driver"] = driver
    return facts


def _torch() -> Any | None:
    try:
        import torch
    except Exception:  # missing or broken; the report lists its version either way
        return None
    return torch


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "nvidia-smi fails"
    return next(iter(ran.stdout.split()), None)


def _gpus() -> Iterator[dict[str, Any]]:
    torch = _torch()
    if torch is None or not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = f"{gpu.major}.{gpu.minor}"
        yield {"name": gpu.name, "memory": gpu.total_memory, "capability": capability}


def _libraries() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"gemma4_compat": __version__}
    for name in REPORTED:
        try:
            versions[name] = installed_version(name) or "unknown version"
        except importlib.metadata.PackageNotFoundError:
            if name not in _OPTIONAL:
                versions[name] = None
    torch = sys.modules.get("torch")
    if torch is not None:  # with the build, as in 2.13.0+cu130
        versions["torch"] = str(torch.__version__)
    return versions


# -- the model ------------------------------------------------------------------------------------


def _checkpoint(model_dir: Path | Repository) -> dict[str, Any]:
    from .mapped import Mapped

    config = read_config(model_dir)
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    quantised = config.get("quantization_config")
    mapped = Mapped(model_dir, {"": 0})
    data: dict[str, Any] = {
        "name": short_name(
            str(model_dir if isinstance(model_dir, Repository) else model_dir.absolute())
        ),
        "class": type(mapped.model).__name__,
        "model_type": config["model_type"],
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        "written_by": config.get("transformers_version"),
        "layers": text.get("num_hidden_layers"),
        "layers_that_share_kv": text.get("num_kv_shared_layers"),
        "quantised": quantised.get("quant_method") if isinstance(quantised, dict) else None,
        "weights": None,
        "bytes": {
            part: sizes for part in PARTS if any((sizes := _sizes(mapped.whole, part)).values())
        },
    }
    if is_in(model_dir, INDEX) or is_in(model_dir, WEIGHTS):
        headers = weight_headers(model_dir)
        data["weights"] = {
            "files": len(headers),
            "tensors": sum(len(header.tensors) for header in headers),
            "bytes": sum(entry.bytes for header in headers for entry in header.tensors.values()),
            "missing_bytes": sum(header.missing for header in headers),
        }
    return data


def _sizes(whole: Mapping[str, Iterable[TensorSize]], part: str) -> dict[str, int]:
    return {
        quant: sum(t.bytes for t in tensors if t.part == part) for quant, tensors in whole.items()
    }


# -- Markdown -------------------------------------------------------------------------------------


def _markdown(report: Report) -> Iterator[str]:
    yield "### System"
    yield ""
    for name, value in report.system.items():
        yield f"- {name}: {value}"
    for index, gpu in enumerate(report.gpus):
        yield f"- GPU {index}: {gpu['name']}, {size(gpu['memory'])}, capability {gpu['capability']}"
    if not report.gpus:
        yield "- GPU: none that PyTorch sees"
    for name, version in report.libraries.items():
        yield f"- {name}: {version or 'not installed'}"
    yield ""
    yield "### Patches of gemma4_compat"
    yield ""
    by_state: dict[str, list[str]] = {}
    for name, patch in report.patches.items():
        by_state.setdefault(patch["state"], []).append(name)
    for state, names in by_state.items():
        yield f"- {state} ({len(names)}): {', '.join(names)}"
        if state in (State.FAILED.value, State.DRIFTED.value):
            yield from (f"  - {name}: {report.patches[name]['reason']}" for name in names)
    if report.model is not None:
        yield from ("", f"### Model: {report.model['name']}", "")
        yield from _model_lines(report.model)
    for title, data in (
        ("Device map", report.device_map),
        ("Adapter", report.adapter),
    ):
        if data is not None:
            yield from ("", f"### {title}", "", "```text", data["text"], "```")


def _model_lines(model: Mapping[str, Any]) -> Iterator[str]:
    yield f"- class: {model['class']} (model_type {model['model_type']})"
    layers = f"{model['layers']}"
    if model["layers_that_share_kv"]:
        layers += f", {model['layers_that_share_kv']} of them share keys and values"
    yield f"- layers: {layers}"
    yield f"- dtype: {model['dtype']}, written by transformers {model['written_by']}"
    if model["quantised"]:
        yield f"- already quantised: {model['quantised']}"
    weights = model["weights"]
    if weights is None:
        yield "- weights: no safetensors files in the folder"
    else:
        files = f"{plural(weights['tensors'], 'tensor')} in {plural(weights['files'], 'file')}"
        yield f"- weights: {files}, {size(weights['bytes'])}"
        if weights["missing_bytes"]:
            yield f"- **cut off**: {size(weights['missing_bytes'])} of the weights are missing"
    yield ""
    quants = list(next(iter(model["bytes"].values())))
    yield f"| part | {' | '.join(quants)} |"
    yield f"|---|{'---:|' * len(quants)}"
    for part, numbers in model["bytes"].items():
        yield f"| {part} | {' | '.join(map(size, numbers.values()))} |"
    totals = (sum(numbers[quant] for numbers in model["bytes"].values()) for quant in quants)
    yield f"| all | {' | '.join(map(size, totals))} |"
