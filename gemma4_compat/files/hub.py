"""Reads single files of a repository on the Hugging Face Hub.

The cache of huggingface_hub is used as transformers uses it: a file is looked up on the Hub, and
taken from the cache if it is unchanged or the Hub cannot be reached.  Weights are never downloaded:
of a file that is not in the cache, huggingface_hub reads the header.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import InputError, reason

_NAME = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_LOCATION = re.compile(rf"({_NAME}/{_NAME})(?:@([^\s@\\]+))?", re.ASCII)
#: the end of a name that is a file's, not a repository's
_FILES = (".safetensors", ".json", ".bin", ".pt", ".pth")


def repository(text: str) -> Repository | None:
    """The repository that "NAMESPACE/NAME" or "NAMESPACE/NAME@REVISION" names.

    ``None`` if the text cannot be a Hub id.  The Hub is not asked.
    """
    match = _LOCATION.fullmatch(text)
    if match is None or match[1].endswith(_FILES) or "--" in match[1] or ".." in match[1]:
        return None
    return Repository(match[1], match[2])


def id_and_revision(location: str) -> tuple[str, str | None]:
    """The arguments of ``from_pretrained`` for a folder or a Hub id; the revision may be None."""
    found = None if os.path.exists(location) else repository(location)
    return (location, None) if found is None else (found.id, found.revision)


def short_name(location: str) -> str:
    """The last component of a path or a Hub id, for a title; the revision is kept."""
    if id_and_revision(location)[1] is not None:
        return location.partition("/")[2]
    return Path(location).name or location


class Repository:
    """A model or an adapter on the Hub.

    All files are read from the commit of the first one that `file` returns, so that they belong
    together.  ``str()`` is the text that the user wrote.
    """

    def __init__(self, id: str, revision: str | None = None) -> None:
        self.id, self.revision = id, revision
        self._commit: str | None = None

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"

    def __truediv__(self, name: str) -> PurePosixPath:
        """The name of a file in messages."""
        return PurePosixPath(str(self), name)

    def file(self, name: str) -> Path | None:
        """The local copy of a small file, or ``None`` if the repository has no such file.

        Raises:
            InputError: the repository cannot be read.
        """
        # If the cache lacks the file, hf_hub_download tries for half a minute to reach the Hub.
        if not self.contains(name):
            return None
        with self._asking(name) as hub:
            file = Path(hub.hf_hub_download(self.id, name, revision=self._at))
        self._commit = self._commit or file.parents[name.count("/")].name
        return file

    def cached(self, name: str) -> Path | None:
        """The file in the cache, or ``None``; the Hub is not asked."""
        hub = _imported(self)
        found = hub.try_to_load_from_cache(self.id, name, revision=self._at)
        return Path(found) if isinstance(found, str) else None

    def contains(self, name: str) -> bool:
        """Whether the repository has this file, which is not downloaded.

        Raises:
            InputError: the repository cannot be read.
        """
        with self._asking(name) as hub:
            known = hub.try_to_load_from_cache(self.id, name, revision=self._at)
            if isinstance(known, str):
                return True
            if known is not None and (self._commit or hub.constants.is_offline_mode()):
                return False  # the cache also stores that a commit has no such file
            try:
                hub.get_hf_file_metadata(hub.hf_hub_url(self.id, name, revision=self._at))
            except hub.errors.RemoteEntryNotFoundError:
                return False
            return True

    def safetensors(self, name: str) -> Any:
        """The header of a safetensors file, as huggingface_hub's ``SafetensorsFileMetadata``.

        Raises:
            InputError: the repository cannot be read, or has no such file, or it is damaged.
        """
        with self._asking(name) as hub:
            return hub.HfApi().parse_safetensors_file_metadata(self.id, name, revision=self._at)

    def download(self, patterns: Sequence[str]) -> Path:
        """The folder of the cache that holds all files that match these patterns.

        Raises:
            InputError: the repository cannot be read.
        """
        with self._asking("complete copy of it", bars=True) as hub:
            options = {"revision": self.revision, "allow_patterns": list(patterns)}
            return Path(hub.snapshot_download(self.id, **options))

    @property
    def _at(self) -> str | None:
        return self._commit or self.revision

    @contextlib.contextmanager
    def _asking(self, name: str, *, bars: bool = False) -> Iterator[Any]:
        """huggingface_hub, without its warnings, and without progress bars unless ``bars``.

        Its errors become ``InputError``.
        """
        hub = _imported(self)
        hides = not bars and not hub.utils.are_progress_bars_disabled()
        verbosity = hub.utils.logging.get_verbosity()
        hub.utils.logging.set_verbosity_error()
        if hides:
            hub.utils.disable_progress_bars()
        try:
            yield hub
        except Exception as error:  # also those of the HTTP library
            raise self._refusal(name, error) from error
        finally:
            hub.utils.logging.set_verbosity(verbosity)
            if hides:
                hub.utils.enable_progress_bars()

    def _refusal(self, name: str, error: Exception) -> InputError:
        from huggingface_hub import constants, errors

        if isinstance(error, errors.GatedRepoError):
            url = f"{constants.ENDPOINT}/{self.id}"
            why = f"gated: accept the license at {url} and log in: hf auth login"
        elif isinstance(error, errors.RepositoryNotFoundError):
            why = (
                "not a folder here, and not found on the Hub. Is it misspelt? If it is private, "
                "log in: hf auth login"
            )
        elif isinstance(error, errors.RevisionNotFoundError):
            why = f"the Hub has no revision {self.revision} of it"
        elif isinstance(error, errors.SafetensorsParsingError):
            why = f"{name} is not a safetensors file, or its header is damaged"
        else:
            why = f"not a folder here, and the cache of the Hub has no {name}. "
            if constants.is_offline_mode():
                why += "HF_HUB_OFFLINE is set: unset it, or name a local folder"
            else:
                cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
                why += f"Check the network, or name a local folder ({reason(cause)})"
        return InputError(f"{self}: {why}")


def _imported(repo: Repository) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils.logging
    except ImportError as error:
        raise InputError(
            f"{repo}: no such folder; if it is a Hub id: pip install -U huggingface_hub"
        ) from error
    return huggingface_hub
