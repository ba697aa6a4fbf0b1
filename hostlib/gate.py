"""A gate that is shut while the host is being replaced: new work waits at it."""

import trio


class Gate:
    """A gate for tasks; open at first."""

    def __init__(self) -> None:
        self._opened: trio.Event | None = None

    def shut(self) -> None:
        """Make tasks wait until ``open``."""
        self._opened = trio.Event()

    def open(self) -> None:
        """Let waiting tasks and all later ones pass."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.set()

    async def wait_open(self) -> None:
        """Wait while the gate is shut.

        Not a checkpoint while it is open.
        """
        while self._opened is not None:
            await self._opened.wait()
