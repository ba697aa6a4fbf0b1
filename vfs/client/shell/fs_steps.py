"""The steps of ``sandhost fs``: what fails in one is told in one line.

Two contexts that its commands are made of.
"""

from __future__ import annotations

import errno
import os

from vfs.client.shell.frame import StepError, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vfs.client import Client


class Doing:
    """A step: what fails inside is told as ``cannot VERB 'NAME': REASON``."""

    __slots__ = ("_names", "_what")

    def __init__(self, verb: str, *names: bytes) -> None:
        self._names = names
        self._what = f"{verb} {' to '.join(map(shown, names))}".rstrip()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, why: BaseException | None, trace: object) -> None:
        # A reader that is gone is no failure of ours (``frame``, rule 3).
        if isinstance(why, OSError) and not isinstance(why, BrokenPipeError):
            raise StepError(f"cannot {self._what}: {self._reason(why)}") from why

    def _reason(self, why: OSError) -> str:
        if why.errno == errno.EOVERFLOW:
            return "the directory has more entries than one answer may tell (100,000)"
        last = {os.path.basename(name.rstrip(b"/")) for name in self._names}
        if why.errno == errno.EINVAL and last & {b".", b".."}:
            return "'.' and '..' name no entry of a directory; write its own name"
        return why.strerror or str(why)


class Opened:
    """A file of the host, open for a while.

    Closed at the end.  After a failure it is left to the end of the connection, so that
    half of a file is not published; on a shared connection that would be too late.
    """

    __slots__ = ("_client", "_fileno", "_mode", "_name", "_top_level")

    def __init__(
        self, client: Client, name: bytes, mode: str, top_level: bool | None
    ) -> None:
        self._client = client
        self._name = name
        self._mode = mode
        self._top_level = top_level
        self._fileno = 0

    def __enter__(self) -> int:
        with Doing("open", self._name):
            self._fileno = self._client.open(self._name, self._mode, self._top_level)
        return self._fileno

    def __exit__(self, kind: object, why: object, trace: object) -> None:
        if kind is None:
            with Doing("close", self._name):
                self._client.close(self._fileno)
        elif self._client.is_shared:
            try:
                self._client.close(self._fileno)
            except OSError:
                return  # what failed before is what is told
