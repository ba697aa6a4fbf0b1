"""A gate that is shut while the host is being replaced: what would begin waits."""

import trio


class Gate:
    """Open at first."""

    def __init__(self) -> None:
        self._opened: trio.Event | None = None

    def shut(self) -> None:
        """Let nobody pass until ``open``."""
        self._opened = trio.Event()

    def open(self) -> None:
        """Let those pass who have waited."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.set()

    async def passed(self) -> None:
        """Wait while the gate is shut.

        Not a checkpoint while it is open.
        """
        while self._opened is not None:
            await self._opened.wait()
