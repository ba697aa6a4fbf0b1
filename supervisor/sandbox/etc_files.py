"""Who a child is by name: files of ``/etc`` that are its own, in a fresh root.

Rule: they say nothing of the host's users, nor which machine this is.
"""

from __future__ import annotations

import os

OwnFiles = tuple[tuple[bytes, bytes], ...]
"""(path, content) of each."""

NAME = "child"
"""Of the child's user and group, where they are not root's."""

_NOBODY = 65534


def files_of(uid: int, gid: int, home: str) -> OwnFiles:
    """Return the files that name a child's user.

    Args:
        uid: as the child sees its number.
        gid: as above.
        home: its HOME.
    """
    if not home.startswith("/") or {":", "\n"} & set(home):  # passwd(5) cannot say it
        home = "/"
    own = f"{NAME}:x:{uid}:{gid}:{NAME}:{home}:/bin/sh"
    root = "root:x:0:0:root:/root:/bin/sh"
    if uid == 0:
        root, own = f"root:x:0:{gid}:root:{home}:/bin/sh", ""
    nobody = f"nobody:x:{_NOBODY}:{_NOBODY}:nobody:/nonexistent:/usr/sbin/nologin"
    own_group = f"{NAME}:x:{gid}:" if gid != 0 else ""
    contents = {
        "passwd": _lines(root, own, nobody),
        "group": _lines("root:x:0:", own_group, f"nogroup:x:{_NOBODY}:"),
        "machine-id": _lines(os.urandom(16).hex()),
        "subuid": b"",
        "subgid": b"",
    }
    return tuple(
        (f"/etc/{name}".encode(), content) for name, content in contents.items()
    )


def _lines(*lines: str) -> bytes:
    return b"".join(os.fsencode(line) + b"\n" for line in lines if line)
