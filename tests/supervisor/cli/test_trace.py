"""A client's timeline: whose events are in it, and what they say."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hostlib.journal import EVENTS
from supervisor.cli.trace import last_timeline, line, sentence

Event = dict[str, Any]


def event(name: str, second: int = 0, /, **fields: Any) -> Event:
    """An event as the journal has it."""
    time = f"2026-01-02T03:04:{second:02}.500000Z"
    return {"time": time, "event": name, **fields}


def born(child: int, client: int, second: int = 0, /, **more: Any) -> list[Event]:
    """A child and its connection."""
    own = {"child_id": f"child-{child}", "client_id": f"c{client}"}
    return [
        event("client.connected", second, **own, pid=child),
        event("child.spawned", second, **own, pid=child, command=["sh"], **more),
    ]


LIFE = [
    event("host.started"),
    *born(1, 1, 1, name="web"),
    *born(2, 2, 1),
    event("client.connected", 2, child_id="child-1", client_id="c3", parent_id="c1"),
    event("client.connected", 2, child_id="child-1", client_id="c4", parent_id="c3"),
    event("file.opened", 3, child_id="child-1", client_id="c4", fileno=1000),
    event("file.opened", 3, child_id="child-2", client_id="c2", fileno=1001),
    event("llm.called", 4, child_id="child-1", client_id="c3", model="m"),
    event("exec.started", 5, child_id="child-1", exec_id="e1"),
    event("exec.started", 5, child_id="child-2", exec_id="e2"),
    event("child.signalled", 6, child_id="child-1", signal=15, pid=1),
    event("child.exited", 7, child_id="child-1", signal=15),
    event("child.restarting", 8, name="web", delay_s=1.0),
]


def names(subject: str, events: list[Event] = LIFE) -> list[str]:
    """The events of a timeline."""
    return [entry.event["event"] for entry in last_timeline(subject, events)]


def test_a_childs_own_client_has_its_process_and_all_nested_ones() -> None:
    entries = last_timeline("c1", LIFE)
    assert [entry.event["event"] for entry in entries] == [
        "client.connected", "child.spawned", "client.connected", "client.connected",
        "file.opened", "llm.called", "exec.started", "child.signalled", "child.exited",
    ]  # fmt: skip
    assert [entry.depth for entry in entries[:6]] == [0, 0, 1, 2, 2, 1]
    assert not any(entry.event.get("client_id") == "c2" for entry in entries)


def test_a_nested_client_has_its_own_and_those_beneath_it() -> None:
    assert names("c3") == [
        "client.connected", "client.connected", "file.opened", "llm.called",
    ]  # fmt: skip
    assert names("c4") == ["client.connected", "file.opened"]


def test_a_child_is_found_by_its_name_over_all_its_processes() -> None:
    assert names("web")[-1] == "child.restarting"
    again = [*LIFE, *born(3, 5, 9, name="web")]
    assert names("web", again)[-1] == "child.spawned"
    assert names("child-2") == ["client.connected", "child.spawned", "file.opened",
                                "exec.started"]  # fmt: skip


# spec NET11: a child chooses the names that it asks for, and none is another child's.
def test_a_host_with_the_name_of_a_child_is_not_that_child() -> None:
    asked = {"child_id": "child-2", "name": "web", "port": 80, "reason": "no-rule"}
    events = [*LIFE, event("network.refused", 9, **asked)]
    assert names("web", events) == names("web")
    assert names("child-2", events)[-1] == "network.refused"


def test_ids_begin_anew_with_each_host() -> None:
    second = [event("host.started", 20), *born(1, 1, 21)]
    entries = last_timeline("c1", LIFE + second)
    assert [entry.event["event"] for entry in entries] == [
        "client.connected", "child.spawned",
    ]  # fmt: skip
    assert entries[0].since_s == 0
    assert len(last_timeline("c4", LIFE + second)) == 2, "the last host that knew it"


def test_who_is_not_there_has_no_timeline() -> None:
    assert last_timeline("c9", LIFE) == []
    assert last_timeline("", LIFE) == []


def test_a_line_tells_when_how_long_after_who_and_what() -> None:
    entries = last_timeline("c1", LIFE)
    assert line(entries[4]).split() == [
        "03:04:03.500", "+", "2.000", "c4", "file.opened", "1000", "None",
    ]  # fmt: skip
    assert line(entries[4]).index("c4") == line(entries[0]).index("c1") + 4


def test_what_events_say() -> None:
    said = {
        sentence(event("child.exited", signal=9, utime_s=1.5, maxrss_kib=2048)):
            "SIGKILL; 1.50 s of processor, 2 MiB",
        sentence(event("child.exited", code=3, timed_out=True)):
            "status 3, its time was up; 0.00 s of processor, 0 MiB",
        sentence(event("file.opened", fileno=1000, mode="r", filename="a b")):
            "1000 r a b",
        sentence(event("file.auto_closed", fileno=1, filename="a", reason="pipe EOF")):
            "1 a (pipe EOF)",
        sentence(event("security.denied", command="OPEN", filename="/x")): "OPEN /x",
        sentence(event("network.refused", name="a.b", port=443, reason="no-rule",
                       rule="a.b:443")): "a.b:443: no-rule; the rule 'a.b:443' would allow it",
        sentence(event("network.refused", name="a.b", port=80, reason="refused-by-rule",
                       rule="!*.b:80")):
            "a.b:80: refused-by-rule; the rule '!*.b:80' refuses it",
        sentence(event("network.refused", name="a", port=None, reason="no-name")):
            "a: no-name",
        sentence(event("network.failed", name="a", port=80, reason="ETIMEDOUT")):
            "a:80: ETIMEDOUT",
        sentence(event("network.changed", allow=["a"], deny=["b:1"], cut=True)):
            "--allow a --deny b:1 --cut",
        sentence(event("network.narrowed", rules=["a", "b:1"])): "a b:1",
        sentence(event("network.narrowed", rules=[])): "no rules",
        sentence(event("network.reset", connections=2)): "2: the host was replaced",
        sentence(event("llm.called", model="m", outcome="ok", prompt_tokens=1,
                       completion_tokens=2, latency_ms=12.3)): "m ok: 1 + 2 tokens, 12 ms",
        sentence(event("exec.ended", exec_id="e", code=0, output_bytes=5)):
            "e: status 0, 5 bytes of output",
        sentence(event("exec.failed", exec_id="e", tool="make", sidecar="c", code=127,
                       reason="Not a directory")):
            "e: make in c, status 127; Not a directory",
        sentence(event("client.gone", reason="process exit", closed_files=[1, 2])):
            "process exit; closed 1, 2",
        sentence(event("child.gone", failure="not found")): "not found",
        sentence(event("host.lagged", lag_s=0.3)): "lag_s=0.3",
    }  # fmt: skip
    for text, expected in said.items():
        assert text == expected


@given(
    st.sampled_from([*EVENTS, "llm.called", "exec.started", "new.event"]),
    st.dictionaries(
        st.sampled_from(["filename", "reason", "model", "tool", "command", "signal"]),
        st.text() | st.integers() | st.none(),
    ),
)
def test_no_event_is_too_strange_to_be_shown(name: str, fields: Event) -> None:
    if not isinstance(fields.get("command"), str):
        fields.pop("command", None)
    events = [*born(1, 1), event(name, 9, **{**fields, "client_id": "c1"})]
    for entry in last_timeline("c1", events):
        assert line(entry).isprintable()
