"""A member whose session ends, and that joins its fleet anew."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeVar, cast

import trio

from supervisor.cluster.peers import stream_by
from supervisor.config.fleet import FleetSection
from supervisor.fleet.clocks import read_clocks
from supervisor.fleet.link import FrameReader, LinkArgs, encode_frame
from supervisor.fleet.messages import (
    Base,
    Beat,
    ChildNews,
    Join,
    Joined,
    Message,
    Program,
    Refused,
    Renewed,
    Session,
    Start,
    decode_from_node,
)
from supervisor.membership.base_keeper import BaseKeeper
from supervisor.membership.bases import Bases, PeerError
from supervisor.membership.member import Member
from tests.helpers.stage import eventually, open_stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from supervisor.kept_children.roster import Children

M = TypeVar("M")

LEASE_S = 600.0
BASE = Base("other", "/base", "d" * 64, 1, 1)


@dataclass
class Fetch:
    """A base on its way, in a thread that is not abandoned."""

    may_end: trio.Event = field(default_factory=trio.Event)


class SlowBases(BaseKeeper):
    """Bases of which none comes before the test lets it."""

    def __init__(self, directory: str) -> None:
        super().__init__(Bases(directory, 1, 1), stream_by(""))
        self.begun, self.fetches = trio.open_memory_channel[Fetch](9)

    async def ready(self, base: Base) -> str:
        """Find no node that has it, once the test says so."""
        fetch = Fetch()
        self.begun.send_nowait(fetch)
        with trio.CancelScope(shield=True):
            await fetch.may_end.wait()
        raise PeerError(f"cannot reach node {base.node!r}")


class AsDirectory:
    """The end of a member's link at the directory."""

    def __init__(self, member: Member, stream: trio.SocketStream) -> None:
        self._member = member
        self._stream = stream
        self._reader = FrameReader(decode_from_node)
        self._come: list[Message] = []

    async def send(self, message: Message) -> None:
        """Send a message to the member."""
        await self._stream.send_all(encode_frame(message))

    async def receive(self, kind: type[M]) -> M:
        """Return the next message of a kind; answer beats, skip others."""
        while True:
            while self._come:
                message = self._come.pop(0)
                if isinstance(message, kind):
                    return message
                if isinstance(message, Beat):
                    await self.send(Renewed(1, message.session, message.number))
            data = bytes(await self._stream.receive_some(65_536))
            assert data, "the link has ended"
            self._come += self._reader.feed(data)

    async def admit(self) -> Session:
        """Let the node join; return its session once its lease is held."""
        join = await self.receive(Join)
        await self.send(Joined(1, join.session, join.number, LEASE_S))
        node = self._member.node
        assert node is not None
        await eventually(lambda: node.is_member(read_clocks()))
        return join.session


@asynccontextmanager
async def linked(tmp_path: Path, bases: BaseKeeper) -> AsyncIterator[AsDirectory]:
    """Yield the directory's end of the link of a member on a host."""
    theirs, ours = (
        trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        for sock in socket.socketpair()
    )
    async with theirs, ours, open_stage(tmp_path) as stage:
        children = cast("Children", SimpleNamespace(state_dir=str(tmp_path)))
        member = Member(stage.host, children, FleetSection(), str(tmp_path), bases)
        async with trio.open_nursery() as nursery:
            await nursery.start(member.run)
            _, serve = member.link(LinkArgs("n1"))
            nursery.start_soon(serve, theirs, b"")
            yield AsDirectory(member, ours)
            nursery.cancel_scope.cancel()


# spec FL4, FL10: a base that is unpacked cannot be abandoned, so it may outlast the
# session; the child of the next session is another one.
async def test_a_base_of_the_session_before_may_come_late(tmp_path: Path) -> None:
    bases = SlowBases(str(tmp_path))
    async with linked(tmp_path, bases) as directory:
        fetches = []
        for incarnation in (1, 2):
            session = await directory.admit()
            program = Program(("true",), base=BASE)
            await directory.send(Start(1, session, "c1", "web", incarnation, program))
            fetches.append(await bases.fetches.receive())
            if incarnation == 1:
                await directory.send(Refused(1, session, "it is over", is_final=False))
        for fetch in fetches:
            fetch.may_end.set()
        news = await directory.receive(ChildNews)
        assert (news.report.incarnation, news.report.state) == (2, "refused")
