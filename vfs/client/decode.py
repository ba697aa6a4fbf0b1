"""Encoders and decoders of payloads and bodies for both clients, without I/O.

Loaded by the first call that needs it.
"""

from __future__ import annotations

import json
import os

from vfs.client.turn import client_errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vfs.client.errors import Name


class Status:
    """The result of STAT.

    Attributes:
        size: size in bytes.
        mtime_ns: time of the last change of the content, ns since 1970.
        kind: ``file``, ``directory``, or another word of the host.
    """

    __slots__ = ("kind", "mtime_ns", "size")

    def __init__(self, size: int, mtime_ns: int, kind: str) -> None:
        self.size = size
        self.mtime_ns = mtime_ns
        self.kind = kind

    def __repr__(self) -> str:
        return f"Status({self.size}, {self.mtime_ns}, {self.kind!r})"


def status(body: bytes) -> Status:
    """Return the status in STAT's body."""
    fields = mapping(body)
    match fields:
        case {"size": int(size), "mtime_ns": int(mtime_ns), "kind": str(kind)}:
            return Status(size, mtime_ns, kind)
        case _:
            raise client_errors().unreadable("STAT", body)


def entries(body: bytes) -> list[tuple[str, str]]:
    """Return the (name, kind) pairs in LIST's body."""
    rows = _parse(body)
    if not isinstance(rows, list):
        raise client_errors().unreadable("LIST", body)
    found = []
    for row in rows:
        match row:
            case {"name": str(name), "kind": str(kind)}:
                found.append((name, kind))
            case {"name_b64": str(encoded), "kind": str(kind)}:
                found.append((_decode_name(encoded), kind))
            case _:
                raise client_errors().unreadable("LIST", body)
    return found


def _decode_name(encoded: str) -> str:
    from binascii import a2b_base64  # noqa: PLC0415 - for the rare name only

    return os.fsdecode(a2b_base64(encoded))


def mapping(body: bytes) -> dict[str, object]:
    """Return the JSON object in a body."""
    value = _parse(body)
    if not isinstance(value, dict):
        raise client_errors().unreadable("the request", body)
    return value


def _parse(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError:
        raise client_errors().unreadable("the request", body) from None


def commands_of(caps: Mapping[str, object]) -> frozenset[str]:
    """Return the command words in the answer to CAPS."""
    told = caps.get("commands")
    if not told or not isinstance(told, list | dict):
        raise client_errors().FsProxyError("the host's CAPS lacks its commands")
    return frozenset(map(str, told))


def encode_rights(rights: Mapping[str, object]) -> bytes:
    """Return NARROW's document; names that are not UTF-8 are in base64."""
    document = dict(rights)
    for key in ("read", "write"):
        names = document.get(key)
        if isinstance(names, list | tuple):
            document[key] = [_encode_name(name) for name in names]
    return json.dumps(document).encode("ascii")


def _encode_name(name: object) -> object:
    if not isinstance(name, str | bytes | os.PathLike):
        return name  # the host refuses it, with a reason
    raw = os.fsencode(name)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        from binascii import b2a_base64  # noqa: PLC0415 - for the rare name only

        return {"name_b64": b2a_base64(raw, newline=False).decode()}


def encode_call(name: str, arguments: Mapping[str, object]) -> bytes:
    """Return FD_CALL's document."""
    return json.dumps({"name": name, "arguments": dict(arguments)}).encode("ascii")


def chat_parts(
    inputs: Iterable[Name], outputs: Iterable[Name], prompt: str, preset: str
) -> tuple[bytes, bytes, bytes, bytes]:
    """Return LLM_CHAT's four byte strings (spec L1).

    Raises:
        UnsendableError: a name or the preset holds LF.  With an LF in the preset the
            host could wait for three bytes too many.
    """
    lists = []
    for names in (inputs, outputs):
        encoded = [os.fsencode(name) for name in names]
        for name in encoded:
            if b"\n" in name:
                raise client_errors().unsendable_name(name)
        lists.append(b"\n".join(encoded))
    if "\n" in preset:
        raise client_errors().unsendable_name(preset)
    return lists[0], lists[1], prompt.encode(), preset.encode()


def quota_of(status: bytes) -> str:
    """Return the text about the quota in LLM_CHAT's reply line."""
    return status.partition(b" ")[2].decode("utf-8", "replace")
