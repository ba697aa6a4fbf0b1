"""The hierarchical proxy: a nested client works as any other, with less.

Most tests run twice: with a host that knows ATTACH, where each nested client has a
connection of its own, and with one that does not, where they take turns.
"""

import os
import socket

import pytest
import trio
import trio.testing

from protocol import messages as m
from tests.vfs.fakehost import FakeHost
from tests.vfs.fakeline import Gate
from tests.vfs.relay.relayscene import (
    MIB,
    both,
    dialogue,
    scene,
    seen,
    wait,
)
from vfs import client as door
from vfs.client.aio import AsyncClient
from vfs.relay import RelayError, open_relay


@both
async def test_a_nested_client_works_as_any_other(unknown: frozenset[bytes]) -> None:
    # spec N1
    async with scene(unknown) as s:
        _, client = await s.nested()
        content = os.urandom(3 * MIB)
        fileno = await client.open("a b", "w+")
        await client.write(fileno, content)
        await client.seek(fileno, 0)
        assert await client.read_all(fileno) == content
        await client.sync(fileno)
        await client.truncate(fileno, 5)
        await client.close(fileno)
        await client.rename("a b", "c d")
        assert await client.listdir() == [("c d", "file")]
        await client.mkdir("d")
        await client.remove("c d")
        with pytest.raises(FileNotFoundError):
            await client.stat("c")
        assert await client.llm_quota() == "110.0 weighted tokens (no limit)"
        assert await client.llm_config() == {"default_model": "m"}
        assert "OPEN" in str((await client.caps())["commands"])
        await client.ping()


@both
async def test_the_flag_is_forced_to_false(unknown: frozenset[bytes]) -> None:
    # spec N3, A5
    async with scene(unknown) as s:
        _, client = await s.nested()
        await client.open("a", "w", top_level=True)
        await client.stat("a", top_level=True)
        await client.listdir(".", top_level=True)
        await client.mkdir("d", top_level=True)
        await client.rename("a", "b", top_level=True)
        await client.remove("b", top_level=True)
        with pytest.raises(door.FsProxyError, match="LLM not available"):
            await client.llm_chat("x", top_level=True)
        flags = [
            request.flag
            for request in s.upstream_of(1).seen
            if isinstance(request, m.Open | m.NameRequest | m.Rename | m.Chat)
        ]
        assert flags == [False] * 7


@both
async def test_replies_come_in_order_whoever_gives_them(
    unknown: frozenset[bytes],
) -> None:
    # spec T3, F3, R2: the relay refuses some of these itself
    requests = (
        b"PING\nNONSENSE\nOPEN a w false\n\nREAD 1 2 3\nCLOSE\nREAD 77 x\n"
        b"WRITE 77 3\nabcWRITE 1 2 3\nabOPEN a q true\nLLM_QUOTA x\nPING\n"
        b"STAT true a\r \nWRITE x 4\nPINGWRITE 5 x\nREAD -1 2\n"
    )
    replies = (
        b"OK\nERROR unknown command: NONSENSE\nOK 1000\nERROR empty request\n"
        b"ERROR READ requires fileno and size\nERROR CLOSE requires fileno\n"
        b"ERROR invalid fileno: 77\nERROR invalid fileno: 77\n"
        b"ERROR WRITE requires fileno and size\nERROR invalid mode: q\n"
        b"ERROR LLM_QUOTA takes no parameters\nOK\nERROR invalid filename: a?\n"
        b"ERROR invalid fileno: x\nERROR invalid size: x\nERROR invalid fileno: -1\n"
    )
    async with scene(unknown) as s:
        nested = await s.connect()
        assert await dialogue(nested.child_end, requests, len(replies)) == replies


@both
async def test_a_line_without_end_is_refused_at_once(
    unknown: frozenset[bytes],
) -> None:
    # spec F4
    async with scene(unknown) as s:
        nested = await s.connect()
        too_long = b"ERROR request line too long\n"
        line = nested.child_end
        assert await dialogue(line, b"x" * 70_000, len(too_long)) == too_long
        assert await dialogue(line, b"x" * 200_000 + b"\nPING\n", 3) == b"OK\n"


@both
@pytest.mark.parametrize("separator", [b"", b"\n"])
async def test_a_chat_is_cut_as_the_host_cuts_it(
    unknown: frozenset[bytes], separator: bytes
) -> None:
    # spec L1: three LFs that are not counted are led upstream too
    async with scene(unknown) as s:
        s.host.chat = (b"{}", b"1.0 weighted tokens (no limit)")
        nested = await s.connect()
        payload = separator.join((b"in", b"out", b"ask " * 20_000, b"general"))
        request = b"LLM_CHAT true 2 3 80000 7\n" + payload + b"PING\n"
        reply = b"OK 2 1.0 weighted tokens (no limit)\n{}OK\n"
        assert await dialogue(nested.child_end, request, len(reply)) == reply
        assert s.host.chatted == [payload]


# spec L1, L2, W4: the separators that some clients do not count go with what is refused.
@both
@pytest.mark.parametrize("gap", [b"", b"\n"])
@pytest.mark.parametrize(
    ("line", "reply", "lacks"),
    [
        (b"maybe 2 3 6 7", b"invalid is_top_level: maybe", b""),
        (
            b"false 2 3 6 7 8",
            (
                b"LLM_CHAT requires is_top_level, input_files_count, output_files_count,"
                b" prompt_length, and preset_length"
            ),
            b"",
        ),
        (b"false 2 3 6 7", b"unknown command: LLM_CHAT", b"LLM_CHAT"),
    ],
)
async def test_a_chat_that_is_refused_leaves_nothing_on_the_line(
    unknown: frozenset[bytes], gap: bytes, line: bytes, reply: bytes, lacks: bytes
) -> None:
    async with scene(unknown | ({lacks} if lacks else frozenset())) as s:
        nested = await s.connect()
        payload = gap.join((b"in", b"out", b"prompt", b"general"))
        request = b"LLM_CHAT " + line + b"\n" + payload + b"PING\n"
        replies = b"ERROR " + reply + b"\nOK\n"
        for _ in range(2):
            assert await dialogue(nested.child_end, request, len(replies)) == replies


async def test_nested_clients_may_speak_the_older_dialect() -> None:
    # spec O5
    async with scene(dialect=1) as s:
        nested = await s.connect()
        requests = b"OPEN a b w\nOPEN c w user\nOPEN d w internal\n"
        replies = b"OK 1000\nOK 1001\nOK 1002\n"
        assert await dialogue(nested.child_end, requests, len(replies)) == replies
        assert s.host.peers[1].seen == [
            m.Open(b"a b", b"w", False),
            m.Open(b"c", b"w", False),
            m.Open(b"d", b"w", False),
        ]


@both
async def test_a_payload_cannot_become_requests_at_a_host_that_does_not_know_it(
    unknown: frozenset[bytes],
) -> None:
    # spec A5: an old host would read what follows as lines, top-level flag and all
    smuggled = b"OPEN secret w true\nCLOSE 1000\n"
    words = (b"FD_PUT", b"FD_CALL", b"NARROW")
    for caps in (frozenset[bytes](), frozenset({b"CAPS"})):
        async with scene(unknown | {*words, b"RENAME"} | caps) as s:
            nested = await s.connect()
            for word in words:
                request = word + b" %d\n" % len(smuggled) + smuggled
                reply = b"ERROR unknown command: " + word + b"\n"
                found = await dialogue(nested.child_end, request, len(reply))
                assert found == reply
            request = b"RENAME true 10 %d\n" % (len(smuggled) - 10) + smuggled
            reply = b"ERROR unknown command: RENAME\n"
            assert await dialogue(nested.child_end, request, len(reply)) == reply
            assert not any(seen(peer, m.Open) for peer in s.host.peers)


@both
async def test_a_client_that_says_no_more_still_gets_its_replies(
    unknown: frozenset[bytes],
) -> None:
    async with scene(unknown) as s:
        s.host.chat = (b"{}", b"1.0 weighted tokens (no limit)")
        gate = s.host.gates[m.Chat] = Gate()
        nested = await s.connect()
        nested.child_end.sendall(b"LLM_CHAT false 0 0 2 0\nhi")
        nested.child_end.shutdown(socket.SHUT_WR)
        await wait(gate)
        gate.opened.set()
        reply = b"OK 2 1.0 weighted tokens (no limit)\n{}"
        assert await dialogue(nested.child_end, b"", len(reply)) == reply


# Rights


async def test_rights_are_narrowed_before_anybody_has_the_connection() -> None:
    # spec A5
    async with scene() as s:
        nested = await s.connect({"read": ["in"], "write": [], "quota": 5})
        client = AsyncClient((nested.child_end.fileno(),))
        peer = s.host.peers[1]
        assert peer.rights == {"read": ["in"], "write": [], "quota": 5}
        assert isinstance(peer.seen[0], m.Narrow)
        s.host.files[b"in"] = bytearray(b"x")
        assert await client.read(await client.open("in"), 5) == b"x"
        with pytest.raises(PermissionError):
            await client.open("in", "w")
        # Its own wish to shrink passes through.
        await client.narrow({"read": [], "write": []})
        with pytest.raises(PermissionError):
            await client.open("in")
        nested.child_end.close()


@pytest.mark.parametrize(
    ("unknown", "why"),
    [
        (frozenset({b"NARROW"}), "does not know NARROW"),
        (frozenset({b"ATTACH"}), "has no ATTACH"),
    ],
)
async def test_what_cannot_be_narrowed_is_not_started(
    unknown: frozenset[bytes], why: str
) -> None:
    # spec A5
    async with scene(unknown) as s:
        with pytest.raises(RelayError, match=why):
            await s.connect({"read": []})
        for peer in s.host.peers[1:]:
            await wait(peer)
        nested = await s.connect()
        nested.child_end.close()


async def test_a_narrowing_that_the_host_refuses_is_an_error() -> None:
    # spec A5
    async with scene() as s:
        s.host.fails[m.Narrow] = b"ERROR invalid rights: read is no list\n"
        with pytest.raises(door.FsProxyError, match="invalid rights"):
            await s.connect({"read": 5})
        await wait(s.host.peers[1])


async def test_in_turns_a_client_cannot_narrow_or_attach() -> None:
    # spec A5, N4: it would be everybody's connection
    async with scene(frozenset({b"ATTACH"})) as s:
        nested = await s.connect()
        request = b"NARROW 2\n{}ATTACH\nPING\n"
        reply = b"ERROR unknown command: NARROW\nERROR unknown command: ATTACH\nOK\n"
        assert await dialogue(nested.child_end, request, len(reply)) == reply
        assert s.host.peers[0].rights is None


# More connections, more depth


async def test_a_nested_client_may_attach_through_the_relay() -> None:
    # spec N4
    async with scene() as s:
        nested, client = await s.nested()
        attached = await client.attach()
        assert s.host.peers[2].parent is s.host.peers[1]
        fileno = await attached.open("a", "w", top_level=True)
        assert seen(s.host.peers[2], m.Open) == [m.Open(b"a", b"w", False)]
        with pytest.raises(door.FsProxyError, match="invalid fileno"):
            await client.close(fileno)
        attached.disconnect()
        await wait(s.host.peers[2])
        assert s.host.open_files() == []
        await trio.testing.wait_all_tasks_blocked()
        assert len(s.relay.lanes) == 1, "what is over is not kept"
        nested.child_end.close()


async def test_attaches_among_other_requests_get_their_descriptors() -> None:
    # spec N4, T3
    async with scene() as s:
        nested = await s.connect()
        nested.child_end.sendall(b"PING\nATTACH\nPING\nATTACH\nPING\n")
        data, fds = b"", []
        while data.count(b"\n") < 5:
            piece, more, _, _ = await trio.to_thread.run_sync(
                socket.recv_fds, nested.child_end, 4096, 8
            )
            data += piece
            fds += more
        assert data == b"OK\nOK 3\nOK\nOK 4\nOK\n"
        for fd in fds:
            attached = AsyncClient((fd,), shared=False)
            await attached.ping()
            attached.disconnect()
        assert len(fds) == 2


async def test_the_end_of_a_process_ends_what_it_attached() -> None:
    # spec S2, S3: nested ones first
    async with scene() as s:
        nested, client = await s.nested()
        attached = await client.attach()
        await attached.open("a", "w")
        await s.relay.client_done(nested)
        await wait(s.host.peers[2])
        assert s.host.open_files() == []
        with pytest.raises(door.ConnectionLostError):
            await attached.ping()
        attached.disconnect()
        nested.child_end.close()


@both
async def test_eight_relays_deep_it_is_the_same(unknown: frozenset[bytes]) -> None:
    # spec N1, N4
    async def deeper(own: AsyncClient, left: int) -> None:
        if left:
            async with open_relay(own) as relay:
                nested = await relay.new_client()
                await deeper(AsyncClient((nested.child_end.fileno(),)), left - 1)
                nested.child_end.close()
                await relay.client_done(nested)
            return
        content = os.urandom(300_000)
        fileno = await own.open("a", "w+", top_level=True)
        await own.write(fileno, content)
        await own.seek(fileno, 0)
        assert await own.read_all(fileno) == content
        if not unknown:
            attached = await own.attach()
            await attached.ping()
            attached.disconnect()

    with FakeHost(unknown=unknown) as host, host.connect() as line:
        await deeper(AsyncClient((line.fileno(),)), 8)
        assert host.open_files() == []
        flags = [r.flag for p in host.peers for r in p.seen if isinstance(r, m.Open)]
        assert flags == [False]
