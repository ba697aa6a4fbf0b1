"""The status page: what it shows, and what it keeps to itself.

`tests/system/e2e/test_status_page_seen.py` looks at it with a browser.
"""

import base64
import hashlib
import os
import platform
import re
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import trio

from supervisor.network.section import NetworkSection
from supervisor.network.service import open_network
from supervisor.observe.registry import RecentEvent
from supervisor.observe.status_facts import MAX_NAMES, Bar, ChildFacts, Facts, Watch
from supervisor.observe.status_page import MAX_CHARS, POLICY, live_part, page
from supervisor.sandbox.plan import PROFILES
from tests.helpers.scrape import listening
from tests.helpers.stage import Stage, stage

pytestmark = pytest.mark.slow

__all__ = ["stage"]


def facts(text: str = "x") -> Facts:
    """Facts in which everything that a child chooses is one text."""
    bar = Bar("Files", 3, 10)
    child = ChildFacts(
        text, text, "running", 7, 1.5, 10_000, 5, 9, 2.0, 1, 2, 3, text, text, bar, bar
    )
    client = {
        "id": "c1",
        "pipe_id": text,
        "open_files": [1],
        "connected_at": "2026-01-02T03:04:05.000000Z",
        "parent_id": None,
        "pid": 7,
    }
    file = {
        "fileno": 1000,
        "filename": text,
        "mode": "r",
        "client_id": "c1",
        "opened_at": "2026-01-02T03:04:05.000000Z",
        "is_top_level": False,
        "offset": 5,
    }
    event = RecentEvent(1e9, text, {"filename": text, "command": text, "key": text})
    figures = {"connections": 1, "open": 0, "bytes_in": 5, "bytes_out": 6}
    reached = {"child": text, "name": text, "port": 443, **figures}
    refused = {
        "child": text,
        "name": text,
        "port": None,
        "reason": text,
        "rule": text,
        "count": 2,
        "time": "2026-01-02T03:04:05.000000Z",
    }
    return Facts(
        *(
            1,
            ((text, text),),
            (bar,),
            (child,),
            (client,),
            (file,),
            (0, 0, 0),
            (event,),
        ),
        reached=(reached,),
        refused=(refused,),
    )


# ---------------------------------------------------------------- text


@pytest.mark.parametrize("make", [page, live_part])
def test_nothing_that_a_child_chooses_becomes_markup(make: object) -> None:
    assert callable(make)
    plain, nasty = make(facts("x")), make(facts("<b q='\"'>&\x1b[31m\n\0\u202e"))
    tags = re.compile(r"<[^>]*>")
    assert tags.findall(plain) == tags.findall(nasty)
    assert not {"\x1b", "\0", "\u202e"} & set(nasty)
    assert "&lt;b q=&#x27;&quot;&#x27;&gt;&amp;?[31m" in nasty


def test_a_long_text_is_cut() -> None:
    shown = live_part(facts("n" * 5000))
    assert "n" * (MAX_CHARS - 1) + "\N{HORIZONTAL ELLIPSIS}" in shown
    assert "n" * MAX_CHARS not in shown


def test_fields_that_nobody_asked_for_are_not_shown() -> None:
    assert "key=" not in live_part(facts("x"))


def test_the_policy_allows_this_style_and_script_and_nothing_else() -> None:
    text = page(facts())
    for tag in ("style", "script"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in POLICY
    assert POLICY.startswith("default-src 'none'")
    assert "unsafe" not in POLICY
    assert not re.search(r"https?://|url\(|@import|style=|\son\w+=", text)


async def test_version_uptime_and_lag_are_shown(stage: Stage) -> None:
    async with listening(stage, page=True) as listener:
        listener.metrics.started_s = time.time() - 3 * 3600
        listener.metrics.note_lag(0.25)
        listener.metrics.note_lag(0.003)
        text = (await listener.curl("/")).body
    assert f"{version('sandhost')} on Python {platform.python_version()}" in text
    told = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    assert told["up"] == "3 h"
    assert (told["loop lag"], told["worst lag"]) == ("3 ms", "250 ms")


# A child that removes what others have made has grown by nothing.
async def test_growth_is_never_less_than_nothing(stage: Stage) -> None:
    (stage.root / "large").write_bytes(bytes(5000))
    async with listening(stage) as listener:
        puppet = await stage.puppet(max_bytes=10_000)
        # A truncation frees what nobody was charged for.
        fileno = await puppet.open(b"large", b"r+")
        assert await puppet.ask(b"TRUNCATE %d 0\n" % fileno) == b"OK"
        session = puppet.child.session
        assert session is not None
        assert session.client.ledger.size_bytes.used < 0
        (row,) = (await Watch(listener.metrics).look()).children
    assert row.growth is not None
    assert row.growth.used == 0


# Events have a place of their own, after all tables.
def test_events_stand_apart_from_the_tables() -> None:
    tables, _, events = live_part(facts()).partition("</main>")
    assert "Open files</h2>" in tables
    assert "Events" not in tables
    assert events.startswith("<aside>")
    assert "<table>" not in events


# ---------------------------------------------------------------- the listener


async def test_the_page_is_there_only_if_it_is_wanted(stage: Stage) -> None:
    async with listening(stage, page=True) as listener:
        reply = await listener.curl("/")
        assert reply.status == 200
        assert f"Content-Security-Policy: {POLICY}" in reply.head
        for line in ("X-Content-Type-Options: nosniff", "Cache-Control: no-store"):
            assert line in reply.head
        assert (await listener.curl("/", "-X", "POST", "-d", "x")).status == 405
        evil = await listener.curl("/", "-H", "Host: evil.example")
        assert evil.status == 421
        events = await listener.curl("/events", "-I")
        assert events.status == 200
        assert "Content-Type: text/event-stream" in events.head
        other = await listener.curl("/", "-I", "-H", "Host: evil.example")
        assert (other.status, other.body) == (421, "")


async def test_arguments_of_a_command_are_not_on_the_page(stage: Stage) -> None:
    async with listening(stage, page=True) as listener:
        child = await stage.sh("exec sleep 1000 # TOPSECRET", env={"KEY": "TOPSECRET"})
        reply = await listener.curl("/")
        assert f"<b>{child.id}</b> <small>sh" in reply.body
        assert "TOPSECRET" not in reply.body


async def test_events_are_sent_when_something_changes(stage: Stage) -> None:
    async with listening(stage, page=True) as listener:
        stream = await trio.open_tcp_stream(*listener.address)
        async with stream:
            await stream.send_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            told = b""

            async def until(text: bytes) -> None:
                nonlocal told
                while text not in told:
                    more = await stream.receive_some()
                    assert more
                    told += more

            await until(b"text/event-stream")
            await until(b"event: state\ndata: ")
            child = await stage.sh("exec sleep 1000")
            await until(f"<b>{child.id}</b>".encode())
        # And the one who went away is noticed, or the listener would not end.


async def test_a_program_may_have_any_name(stage: Stage) -> None:
    program = os.fsencode(stage.where) + b"/odd-\xff"
    os.symlink("/bin/sleep", program)
    await stage.spawn(os.fsdecode(program), "1000")
    async with listening(stage, page=True) as listener:
        assert "odd-\ufffd" in (await listener.curl("/")).body


async def test_a_host_of_many_shows_the_busiest_and_counts_the_rest(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.observe.status_facts.MAX_CHILDREN", 2)
    async with listening(stage) as listener:
        puppets = [await stage.puppet() for _ in range(4)]
        for _ in range(5):
            await puppets[2].ask(b"PING\n")
        seen = await Watch(listener.metrics).look()
        assert len(seen.children) == 2
        assert seen.children[0].name == puppets[2].child.id
        assert seen.more[0] == 2
        assert "and 2 more" in live_part(seen)


ASK = """
import socket
for number in range({count}):
    try:
        socket.getaddrinfo(f"n{{number}}.example", 80, socket.AF_INET)
    except OSError:
        pass
"""


# spec NET11: what a child reached and was refused is on the page, with the rule that would
# allow it.
async def test_names_of_a_child_are_shown(stage: Stage, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # noqa: ASYNC240 - of the test's own
    stage.sandbox = PROFILES["auto"]
    async with listening(stage) as listener, open_network(stage.host):
        assert "Names r" not in live_part(await Watch(listener.metrics).look())
        section = NetworkSection(["granted.example:80"])
        puppet = await stage.puppet(network="rules", network_keys=section)
        await puppet.do(f"exec({ASK.format(count=MAX_NAMES + 2)!r}, globals())")
        seen = await Watch(listener.metrics).look()
        await stage.host.stop(grace_s=0.0)
    names = [f"n{number}.example" for number in range(2, MAX_NAMES + 2)]
    assert [row["name"] for row in seen.refused] == names
    assert {row["reason"] for row in seen.refused} == {"no-rule"}
    (child,) = seen.children
    assert child.network == f"rules, {MAX_NAMES + 2} refused"
    shown = live_part(seen)
    assert "Names refused</h2>" in shown
    assert "n11.example:443" in shown
    assert "Names reached</h2>" not in shown
