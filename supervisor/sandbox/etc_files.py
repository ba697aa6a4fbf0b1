"""Files of ``/etc`` that are a child's own in a fresh root, with its names.

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


def resolver_files(host_name: str) -> OwnFiles:
    """Return the files by which names are looked up where the host answers (NET4).

    Args:
        host_name: of the child.
    """
    own = "" if host_name in {"", "localhost"} else f" {host_name}"
    contents = {
        "resolv.conf": _lines("nameserver 127.0.0.1", "options ndots:1"),
        "hosts": _lines(f"127.0.0.1 localhost{own}", f"::1 localhost{own}"),
        "nsswitch.conf": _lines(
            *(f"{kind}: files" for kind in ("passwd", "group", "shadow")),
            "hosts: files dns",
            *(f"{kind}: files" for kind in ("networks", "protocols", "services")),
        ),
    }
    return tuple(
        (f"/etc/{name}".encode(), content) for name, content in contents.items()
    )


def _lines(*lines: str) -> bytes:
    return b"".join(os.fsencode(line) + b"\n" for line in lines if line)
