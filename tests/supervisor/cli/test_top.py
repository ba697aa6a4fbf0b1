"""`top` without a terminal: rates, order, columns, and what keys do."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.cli.top import SORTS, HostLook, Screen, arrange, figures, table
from supervisor.cli.top_screen import keys_of
from supervisor.observe import tables

Row = dict[str, Any]


def ps_row(name: str = "web", requests: int = 0, **changes: Any) -> Row:
    """A row as the control socket gives it."""
    return {
        "id": f"child-{name}",
        "name": name,
        "pid": 7,
        "state": "running",
        "isolation": {"label": "strict", "profile": "strict", "layers": []},
        "traffic": {
            "requests": requests,
            "errors": 1,
            "bytes_in": 10 * requests,
            "bytes_out": 5000,
            "open_files": 3,
            "last_error": "ERROR invalid fileno: 9",
        },
        "usage": {"state": "sleeping", "cpu_percent": 12.5, "rss_bytes": 10_000_000,
                  "descriptors": 4},
        "llm": {"calls": 1, "tokens": 150, "denials": 0},
        **changes,
    }  # fmt: skip


def shown(*rows: Row) -> list[Row]:
    """The rows of one look, without one before."""
    return figures(None, HostLook(1.0, rows))


def screen_of(*names: str) -> Screen:
    """A screen with idle children of these names."""
    screen = Screen(sort="name")
    screen.show(shown(*(ps_row(name) for name in names)))
    return screen


def pressed(screen: Screen, keys: list[str]) -> list[Any]:
    """Press keys; return what was wished for each."""
    return [screen.press(key) for key in keys]


# ---------------------------------------------------------------- rows


def test_a_rate_is_what_happened_between_two_looks() -> None:
    now = HostLook(12.0, [ps_row(requests=150), ps_row("new", 1000)])
    (web, new) = figures(HostLook(10.0, [ps_row(requests=100)]), now)
    assert (web["requests_per_s"], web["bytes_in_per_s"]) == (25.0, 250.0)
    assert new["requests_per_s"] is None, "it was not there before"


def test_a_host_that_began_anew_gives_no_negative_rate() -> None:
    (row,) = figures(
        HostLook(1.0, [ps_row(requests=100)]), HostLook(2.0, [ps_row(requests=5)])
    )
    assert row["requests_per_s"] == 0


def test_a_child_without_a_process_is_a_row_as_well() -> None:
    (row,) = shown({"id": "web", "name": "web", "state": "given up", "reason": "dies"})
    assert table([row], 80)[1].split() == [
        "web", "given", "up", *"-" * 9, "dies",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("process", "state"),
    [("stopped", "stopped"), ("disk-sleep", "stuck"), ("zombie", "zombie"),
     ("sleeping", "running")],
)  # fmt: skip
def test_the_state_tells_what_is_wrong(process: str, state: str) -> None:
    row = ps_row(usage={"state": process})
    (twice,) = figures(HostLook(1.0, [row]), HostLook(2.0, [row]))
    assert twice["state"] == state
    (once,) = figures(HostLook(1.0, [ps_row()]), HostLook(2.0, [row]))
    assert once["state"] == ("running" if state == "stuck" else state)


def test_rows_are_sorted_by_each_figure() -> None:
    rows = shown(ps_row("a", 1), ps_row("b", 9), ps_row("c", 5, llm=None))
    for sort in SORTS:
        assert len(arrange(rows, sort)) == 3
    rows[1]["requests_per_s"] = 8.0
    assert [row["name"] for row in arrange(rows, "requests")] == ["b", "a", "c"]
    assert [row["name"] for row in arrange(rows, "tokens")] == ["a", "b", "c"]


def test_a_filter_looks_at_names_states_and_errors() -> None:
    rows = shown(ps_row("web"), ps_row("db", state="stopping"))
    for text, names in (("WEB", ["web"]), ("stopp", ["db"]), ("fileno", ["db", "web"])):
        assert [row["name"] for row in arrange(rows, "name", text)] == names


def test_the_columns_hold_what_was_asked_for() -> None:
    (head, line) = table(shown(ps_row(requests=3)), 80)
    assert head.split() == [
        "CHILD", "STATE", "CPU%", "RSS", "FDS", "FILES", "REQ/S", "IN", "OUT",
        "TOKENS", "ISO", "LAST", "ERROR",
    ]  # fmt: skip
    assert line.split()[:11] == [
        "web", "running", "12", "9.5M", "4", "3", "-", "30", "4.9K", "150", "strict",
    ]  # fmt: skip


def test_a_long_name_or_error_cuts_no_figure() -> None:
    rows = shown(ps_row("web"), ps_row("w" * 100))
    rows[0]["last_error"] = "e" * 200
    short, long = table(rows, 80)[1:]
    assert "strict" in short
    assert "strict" in long
    assert "w" * 100 not in long
    assert "w" * 100 in table(rows, None)[2]


@pytest.mark.slow
@given(
    st.text(max_size=200),
    st.integers(0, 10**15),
    st.floats(0, 1e9, allow_nan=False),
    st.text(max_size=300),
)
def test_a_line_fits_80_columns_whatever_a_child_is_called(
    name: str, size: int, rate: float, error: str
) -> None:
    row = shown(ps_row(name, isolation={"profile": name}))[0]
    sizes = dict.fromkeys(("rss_bytes", "bytes_in", "bytes_out", "tokens"), size)
    row |= sizes | {"requests_per_s": rate, "last_error": error}
    for line in table([row], 80):
        # A combining character takes no column of its own.
        assert tables.count_cells(line) <= 80
        assert line.isprintable()


# ---------------------------------------------------------------- keys


def test_letters_sort() -> None:
    screen = Screen()
    for word, (key, _) in SORTS.items():
        screen.press(key)
        assert screen.sort == word
    assert len({key for key, _ in SORTS.values()} | {"q", "k", "K", "/"}) == 13


def test_a_filter_is_typed_kept_and_cleared() -> None:
    screen = screen_of("web", "worker", "db")
    pressed(screen, ["/", "w", "q", "back", "e"])
    assert [row["name"] for row in screen.rows()] == ["web"]
    assert screen.lines(80, 24)[0][-1] == "/we_"
    screen.press("enter")
    assert len(screen.rows()) == 1
    screen.press("escape")
    assert len(screen.rows()) == 3
    assert pressed(screen, ["q"])[0].quit


def test_a_kill_is_asked_back() -> None:
    screen = screen_of("a", "b")
    assert not any(wish.kill for wish in pressed(screen, ["k", "down", "down", "k"]))
    assert screen.lines(80, 24)[0][-1].startswith("SIGTERM to b?")
    assert not screen.press("n").kill
    assert screen.notice == "nothing was killed"
    *_, wish = pressed(screen, ["K", "y"])
    assert (wish.kill, wish.signal) == ("b", "KILL")


def test_who_is_chosen_is_a_name_and_not_a_place() -> None:
    screen = screen_of("a", "b")
    pressed(screen, ["down", "down"])
    screen.show(shown(ps_row("0"), ps_row("a"), ps_row("b")))
    assert screen.press("k").kill == ""
    assert "to b?" in screen.lines(80, 24)[0][-1]


def test_one_that_is_gone_cannot_be_killed() -> None:
    screen = screen_of("a")
    screen.press("down")
    screen.show([])
    assert [wish.kill for wish in pressed(screen, ["k", "y"])] == ["", ""]


def test_keys_are_told_apart_also_when_several_come_at_once() -> None:
    assert keys_of("\x1b[Bk") == ["down", "k"]
    assert keys_of("\x1b[A\x1bOBq") == ["up", "down", "q"]
    assert keys_of("\x1b[5~\x1b[1;5Cx") == ["x"], "others mean nothing"
    assert keys_of("\x1b") == ["escape"]
    assert keys_of("a\r\x7f") == ["a", "enter", "back"]


def test_many_children_scroll_with_the_choice() -> None:
    screen = screen_of(*(f"c{n:03}" for n in range(100)))
    lines, chosen = screen.lines(80, 24)
    assert (len(lines), chosen) == (24, None)
    assert "100 children" in lines[0]
    pressed(screen, ["down"] * 60)
    lines, chosen = screen.lines(80, 24)
    assert chosen is not None
    assert lines[chosen].startswith("c059")
    assert all(len(line) <= 80 for line in lines)
