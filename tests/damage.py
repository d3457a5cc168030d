"""Ways to damage a file, and a part of the error message for each."""

from __future__ import annotations

import codecs
import json
import os
import struct

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n"


def _replaced(make):
    def damage(file):
        raw = file.read_bytes()
        file.unlink()
        make(file, raw)

    return damage


def _link(target):
    return _replaced(lambda file, raw: file.symlink_to(target or file.name))


def _bytes(change):
    return _replaced(lambda file, raw: file.write_bytes(change(raw)))


#: for any file: how to damage it, and a part of the message
ANY = {
    "missing target": (_link("/nowhere/blob"), "a link to /nowhere/blob, which does not exist"),
    "link to itself": (_link(None), "cannot be read: Too many levels of symbolic links"),
    "folder": (_replaced(lambda file, raw: file.mkdir()), "a folder, not a file"),
    "pipe": (_replaced(lambda file, raw: os.mkfifo(file)), "not a regular file"),
    # The file can be opened but not read, even as root.
    "unreadable": (_link("/proc/self/mem"), "cannot be read: Input/output error"),
    "pointer": (_bytes(lambda raw: POINTER), "a Git LFS pointer, not the file itself: run git lfs"),
}
#: for a JSON file
JSON = {
    **ANY,
    "empty": (_bytes(lambda raw: b""), "an empty file"),
    "cut off": (_bytes(lambda raw: raw[: len(raw) // 2]), "not JSON: "),
    "list": (_bytes(lambda raw: b"[1, 2]"), "not a JSON object, but [1, 2]"),
    "text": (_bytes(lambda raw: b'"a"'), 'not a JSON object, but "a"'),
    "null": (_bytes(lambda raw: b"null"), "not a JSON object, but null"),
    "UTF-16": (_bytes(lambda raw: raw.decode().encode("utf-16")), "not JSON in UTF-8, but in"),
    "UTF-32": (_bytes(lambda raw: raw.decode().encode("utf-32")), "not JSON in UTF-8, but in"),
    "mark": (_bytes(lambda raw: codecs.BOM_UTF8 + raw), "it starts with a byte order mark"),
    "Latin-1": (_bytes(lambda raw: b'{"a": "\xe9"}'), "not UTF-8 (byte 7 is 0xe9)"),
    "deep": (_bytes(lambda raw: b"[" * 100_000), "not JSON: "),
    "long number": (_bytes(lambda raw: b'{"a": ' + b"1" * 5000 + b"}"), "not JSON: "),
}  # fmt: skip


def with_header(change, *, data=True):
    """The file with another header: ``change`` edits it as a dict, or returns new bytes."""

    def damaged(raw):
        length = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + length])
        new = change(header)
        new = new if isinstance(new, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(new)) + new + (raw[8 + length :] if data else b"")

    return _bytes(damaged)


def _first(header):
    return header[min(name for name in header if name != "__metadata__")]


def _at_start(header):
    return next(name for name in header if header[name].get("data_offsets", [1])[0] == 0)


def _set(key, value):
    return with_header(lambda header: _first(header).__setitem__(key, value))


_DAMAGED = "its header is damaged"
#: for a safetensors file
SAFETENSORS = {
    **ANY,
    "empty": (_bytes(lambda raw: b""), "cut off in the safetensors header (0 bytes)"),
    "cut off in the header": (_bytes(lambda raw: raw[:100]), "cut off in the safetensors header"),
    "longer": (_bytes(lambda raw: raw + b"more"), "4 extra bytes follow the last tensor"),
    "pickle": (_bytes(lambda raw: b"PK\x03\x04" + raw), "not a safetensors file"),
    "huge header": (
        _bytes(lambda raw: struct.pack("<Q", 2**63) + raw[8:]), "not a safetensors file",
    ),
    "not JSON": (with_header(lambda header: b"{'bad'}"), _DAMAGED),
    "list": (with_header(lambda header: b"[]"), _DAMAGED),
    "UTF-16": (with_header(lambda header: json.dumps(header).encode("utf-16")), _DAMAGED),
    "not a tensor": (with_header(lambda header: header.__setitem__("a", "b")), _DAMAGED),
    "metadata": (with_header(lambda header: header.__setitem__("__metadata__", 3)), _DAMAGED),
    "number": (
        with_header(lambda header: header.__setitem__("__metadata__", {"format": 3})), _DAMAGED,
    ),
    "dtype": (_set("dtype", 3), _DAMAGED),
    "shape": (_set("shape", "many"), _DAMAGED),
    "infinite": (_set("shape", [float("inf")]), _DAMAGED),
    "other shape": (_set("shape", [3]), _DAMAGED),
    "no offsets": (with_header(lambda header: _first(header).pop("data_offsets")), _DAMAGED),
    "offsets": (_set("data_offsets", [0]), _DAMAGED),
    "a tensor less": (with_header(lambda header: header.pop(_at_start(header))), _DAMAGED),
}  # fmt: skip
#: for weights that will be read
CUT_OFF = (_bytes(lambda raw: raw[:-10]), "cut off, 10 bytes are missing: download it again")
