"""One HTTP connection, as a server has it."""

import h11
import trio

MAX_BODY_BYTES = 64 << 20
RECEIVED_BYTES = 65_536


class Line:
    """One HTTP connection.

    Attributes:
        stream: the connection.
        cut_after: bytes of a reply's body that are sent before it breaks off; None
            sends all.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.connection = h11.Connection(h11.SERVER)
        self.cut_after: int | None = None
        self._is_head = False
        self._unsent = bytearray()

    @property
    def may_go_on(self) -> bool:
        """Whether another request may come."""
        return self.connection.our_state is h11.DONE is self.connection.their_state

    async def _event(self) -> object:
        while True:
            event = self.connection.next_event()
            if event is not h11.NEED_DATA:
                return event
            self.connection.receive_data(await self.stream.receive_some(RECEIVED_BYTES))

    async def request(self) -> h11.Request | None:
        """Return the next request; None at the end of the connection."""
        event = await self._event()
        if not isinstance(event, h11.Request):
            return None
        self._is_head = event.method == b"HEAD"
        return event

    async def body(self) -> bytes:
        """Return the request's body."""
        pieces = []
        size = 0
        while isinstance(event := await self._event(), h11.Data):
            pieces.append(bytes(event.data))
            size += len(event.data)
            if size > MAX_BODY_BYTES:
                raise h11.RemoteProtocolError("too much", 413)
        return b"".join(pieces)

    async def hang(self) -> None:
        """Do nothing until the client is gone."""
        await self.flush()
        while await self.stream.receive_some(RECEIVED_BYTES):
            pass
        raise trio.BrokenResourceError

    async def break_off(self) -> None:
        """Send what is unsent, and close the connection."""
        await self.flush()
        await self.stream.aclose()
        raise trio.BrokenResourceError

    async def send(self, event: h11.Event, *, more: bool = False) -> None:
        """Send one event; with the next one if that is known to follow at once."""
        self._unsent += self.connection.send(event) or b""
        if not more:
            await self.flush()

    async def flush(self) -> None:
        """Send what is unsent."""
        if self._unsent:
            data = bytes(self._unsent)
            self._unsent.clear()
            await self.stream.send_all(data)

    async def send_data(self, data: bytes, *, more: bool = False) -> None:
        """Send a part of a reply's body, as far as it may go."""
        if self.cut_after is None:
            await self.send(h11.Data(data=data), more=more)
            return
        part = data[: self.cut_after]
        self.cut_after -= len(part)
        if part:
            await self.send(h11.Data(data=part), more=more)
        if self.cut_after == 0:
            await self.break_off()

    async def begin(self, status: int, kind: str, more: dict[str, str]) -> None:
        """Prepare the head of a reply; it goes with what follows, or by `flush`."""
        headers = [("content-type", kind), *more.items()]
        await self.send(h11.Response(status_code=status, headers=headers), more=True)

    async def end(self) -> None:
        """End the reply."""
        await self.send(h11.EndOfMessage())

    async def reply(
        self,
        data: bytes,
        status: int = 200,
        more: dict[str, str] | None = None,
        kind: str = "application/json",
    ) -> None:
        """Send a whole reply; of one to HEAD its head."""
        length = {"content-length": str(len(data)), **(more or {})}
        await self.begin(status, kind, length)
        if not self._is_head:
            await self.send_data(data, more=True)
        await self.end()
