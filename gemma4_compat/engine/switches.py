"""Environment variables: all patches off, one patch off, one patch forced, strict errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum

_OFF = ("0", "off", "false", "no")
_ON = ("1", "on", "true", "yes")


class Switch(Enum):
    """The setting of one patch."""

    OFF = "off"
    AUTO = "auto"
    #: apply outside the version gate, too; the probe still decides
    FORCE = "force"


@dataclass(frozen=True)
class Switches:
    """The switches, read from the environment once, at import."""

    prefix: str
    everything: bool = True
    strict: bool = False
    patches: Mapping[str, Switch] = field(default_factory=dict)

    def of(self, patch: str) -> Switch:
        """The switch of one patch."""
        return self.patches.get(patch, Switch.AUTO)

    def variable(self, patch: str) -> str:
        """The environment variable that switches one patch."""
        return f"{self.prefix}_{patch.upper()}"


def read(
    prefix: str,
    patches: Iterable[str],
    logger: logging.Logger,
    environ: Mapping[str, str] | None = None,
) -> Switches:
    """Read ``PREFIX``, ``PREFIX_STRICT`` and ``PREFIX_<NAME>``; warn about other variables."""
    environ = os.environ if environ is None else environ
    names = {f"{prefix}_{name.upper()}": name for name in patches}
    strict_name = f"{prefix}_STRICT"
    valid = {_plain(name): name for name in (prefix, strict_name, *names)}
    everything, strict = True, False
    switches: dict[str, Switch] = {}
    for variable in sorted(environ):
        # Windows upper-cases variable names; elsewhere a lower-case name is a typo to warn about.
        if variable.upper() != prefix and not variable.upper().startswith(f"{prefix}_"):
            if meant := valid.get(_plain(variable)):
                logger.warning("environment variable %s has no effect: write %s", variable, meant)
            continue
        value = environ[variable].strip().lower()
        if variable == prefix:
            everything = _boolean(variable, value, True, logger)
        elif variable == strict_name:
            strict = _boolean(variable, value, False, logger)
        elif variable in names:
            if value == Switch.FORCE.value:
                switches[names[variable]] = Switch.FORCE
            elif not _boolean(variable, value, True, logger, extra=(Switch.FORCE.value,)):
                switches[names[variable]] = Switch.OFF
        else:
            ends = {name.removeprefix(f"{prefix}_"): name for name in (strict_name, *names)}
            near = get_close_matches(variable.upper().removeprefix(f"{prefix}_"), ends, n=1)
            hint = (
                f"did you mean {ends[near[0]]}?"
                if near
                else f"{prefix}=0 switches all patches off, {prefix}_PATCH=0 the one of that name"
            )
            logger.warning("unknown environment variable %s has no effect: %s", variable, hint)
    return Switches(prefix, everything, strict, switches)


def _plain(variable: str) -> str:
    return variable.upper().replace("_", "")


def _boolean(
    variable: str,
    value: str,
    default: bool,
    logger: logging.Logger,
    extra: tuple[str, ...] = (),
) -> bool:
    if value in _ON:
        return True
    if value in _OFF:
        return False
    if value:
        logger.warning(
            "%s=%r is not a valid value and has no effect; valid values: %s",
            variable, value, ", ".join((*_OFF, *_ON, *extra)),
        )  # fmt: skip
    return default
