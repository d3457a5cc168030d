"""Ways to damage a file, and a part of the error message for each."""

from __future__ import annotations

import codecs
import json
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
    "missing target": (_link("/nowhere/blob"), "no such file"),
    "link to itself": (_link(None), "cannot be read: Too many levels of symbolic links"),
    "folder": (_replaced(lambda file, raw: file.mkdir()), "cannot be read: Is a directory"),
    # The file can be opened but not read, even as root.
    "unreadable": (_link("/proc/self/mem"), "cannot be read: Input/output error"),
    "pointer": (_bytes(lambda raw: POINTER), "a Git LFS pointer, not the file itself: run git lfs"),
}
#: for a JSON file
JSON = {
    **ANY,
    "empty": (_bytes(lambda raw: b""), "not JSON: "),
    "cut off": (_bytes(lambda raw: raw[: len(raw) // 2]), "not JSON: "),
    "list": (_bytes(lambda raw: b"[1, 2]"), "not a JSON object"),
    "text": (_bytes(lambda raw: b'"a"'), "not a JSON object"),
    "null": (_bytes(lambda raw: b"null"), "not a JSON object"),
    "UTF-16": (_bytes(lambda raw: raw.decode().encode("utf-16")), "not JSON: "),
    "UTF-32": (_bytes(lambda raw: raw.decode().encode("utf-32")), "not JSON: "),
    "mark": (_bytes(lambda raw: codecs.BOM_UTF8 + raw), "not JSON: "),
    "Latin-1": (_bytes(lambda raw: b'{"a": "\xe9"}'), "not JSON: "),
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


def _set(key, value):
    return with_header(lambda header: _first(header).__setitem__(key, value))


_DAMAGED = "its header is damaged"
#: for a safetensors file
SAFETENSORS = {
    **ANY,
    "empty": (_bytes(lambda raw: b""), "not a safetensors file"),
    "cut off in the header": (_bytes(lambda raw: raw[:100]), "cut off in the safetensors header"),
    "pickle": (_bytes(lambda raw: b"PK\x03\x04" + raw), "not a safetensors file"),
    "huge header": (
        _bytes(lambda raw: struct.pack("<Q", 2**63) + raw[8:]), "not a safetensors file",
    ),
    "not JSON": (with_header(lambda header: b"{'bad'}"), _DAMAGED),
    "list": (with_header(lambda header: b"[]"), _DAMAGED),
    "not a tensor": (with_header(lambda header: header.__setitem__("a", "b")), _DAMAGED),
    "shape": (_set("shape", "many"), _DAMAGED),
    "infinite": (_set("shape", [float("inf")]), _DAMAGED),
    "no offsets": (with_header(lambda header: _first(header).pop("data_offsets")), _DAMAGED),
    "offsets": (_set("data_offsets", [0]), _DAMAGED),
}  # fmt: skip
#: for weights that will be read
CUT_OFF = (_bytes(lambda raw: raw[:-10]), "cut off, 10 bytes are missing: download it again")
