"""Events between two programs: the next one gets them.

The next program is a shell script first, which does something in the instant that nobody
is the host, and then becomes the real one by its own exec(2).
"""

import json
import os
import resource
import time
from pathlib import Path

import pytest

from tests.helpers.command import SANDHOST
from tests.helpers.replacing import Replaced, hands, replaced

pytestmark = pytest.mark.slow


def first(host: Replaced, script: str) -> None:
    """Let something be done between this program and the next one."""
    answer = '[ "$1" = handover-check ] && exec $HOST "$@"\n'
    host.next_is(f'{answer}{script}\nexec $HOST "$@"')


# spec S2, S3: the exit is seen, with its status, whoever is the host by then.
def test_a_child_that_dies_between_two_programs_is_mourned(tmp_path: Path) -> None:
    with hands(tmp_path, "dies", "exits", "stays") as (dies, exits, stays):
        with replaced(tmp_path, dies.spec(), exits.spec(), stays.spec()) as host:
            # Its requests before its death are done (spec S2).
            fileno = dies.do("opened(b'words', b'w')")
            orders = tmp_path / "orders"
            os.mkfifo(orders)
            os.mkfifo(f"{orders}2")
            exits.tell(f"os._exit(len(open({str(orders)!r}).read()))")
            dies.tell(
                f"send(b'WRITE {fileno} ' + open({str(orders)!r} + '2').read().encode())"
            )
            script = (
                f"printf '4\\nlast' >{orders}2; sleep 0.2; kill -9 {host.pids[0]}"
                f"; printf abc >{orders}"
            )
            first(host, script)
            host.ask_replace()
            host.hear_up()
            ended = dict(host.hear("ended") for _ in range(2))
            assert ended == {"dies": "137", "exits": "3"}
            assert stays.ask(b"PING\n") == b"OK"
            host.assert_no_leaks()
            assert {r["signal"] for r in host.events("child.exited")} == {9, None}
            (closed,) = host.events("file.auto_closed")
            assert closed["fileno"] == fileno
    assert (tmp_path / "root" / "words").read_bytes() == b"last"


# spec S6: signals between two programs wait for the second.
def test_signals_between_two_programs_wait(tmp_path: Path) -> None:
    with hands(tmp_path, "one") as (one,):
        with replaced(tmp_path, one.spec()) as host:
            # Builtins only: a shell that waits for a command lets signals in.
            once = f"[ -e {tmp_path}/once ] || {{ kill -HUP $$; kill -USR2 $$; }}"
            first(host, f"{once}; : >{tmp_path}/once")
            pids = list(host.pids)
            host.ask_replace()
            host.hear_up()
            host.hear_up()  # for the USR2 that was sent to nobody
            assert (host.generation, host.pids) == (2, pids)
            assert one.ask(b"PING\n") == b"OK"
            first(host, "kill -TERM $$")
            host.ask_replace()
            assert host.hear("ended")[1] in {"143", "137"}
            assert host.wait() == 0


def test_the_journal_goes_on_and_says_what_happened(tmp_path: Path) -> None:
    with hands(tmp_path, "one") as (one,):
        with replaced(tmp_path, one.spec()) as host:
            fileno = one.do("opened(b'new', b'w')")
            host.replace()
            assert one.ask(b"CLOSE %d\n" % fileno) == b"OK"
            one.tell("os._exit(7)")
            assert host.hear("ended") == ["one", "7"]
            assert host.wait() == 0
            names = [
                row["event"]
                for name in (
                    "host.started",
                    "child.spawned",
                    "file.opened",
                    "host.replacing",
                    "host.replaced",
                    "file.closed",
                    "child.exited",
                    "child.gone",
                    "host.stopping",
                )
                for row in host.events(name)
            ]
            assert len(names) == 9  # each of them once
            every = [row for name in names for row in host.events(name)]
            times = [row["time"] for row in every]
            assert times == sorted(times)


def test_a_line_of_the_journal_that_was_cut_off_is_known_to_the_next_program(
    tmp_path: Path,
) -> None:
    journal = tmp_path / "journal"
    # So long that nothing else of the host's meets the bound.
    journal.write_bytes(b'{"event": "earlier"}\n' * 200_000)
    with hands(tmp_path, "one") as (one,), replaced(tmp_path, one.spec()) as host:
        room = journal.stat().st_size + 20
        limits = resource.prlimit(host.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(host.process.pid, resource.RLIMIT_FSIZE, (room, limits[1]))
        host.replace()  # the disk is full: neither program can say so
        resource.prlimit(host.process.pid, resource.RLIMIT_FSIZE, limits)
        one.do("opened(b'new', b'w')")
        one.tell("os._exit(0)")
        assert host.wait() == 0
    lines = journal.read_bytes().splitlines()
    (torn,) = [n for n, line in enumerate(lines) if not line.endswith(b"}")]
    assert len(lines[torn]) == 20
    assert json.loads(lines[torn + 1])["event"] == "file.opened"


# spec N1, N4: a relay in a child, and the children beneath it, notice nothing.
def test_a_relay_goes_on(tmp_path: Path) -> None:
    script = (
        f"{SANDHOST} relay -- /bin/sh -c '"
        f"{SANDHOST} fs put made; echo half; read -r line <going; {SANDHOST} fs cat made'"
    )
    os.mkfifo(tmp_path / "going")
    inner = {
        "name": "outer",
        "command": ["/bin/sh", "-c", f"echo words | {script}"],
    }
    with replaced(tmp_path, inner) as host:
        said = tmp_path / "said-outer"
        while "half" not in said.read_text():
            os.stat(said)
        before, rows = None, {row["id"] for row in host.ask("clients")}
        while before != rows:  # that of `fs put` may have been on its way out
            time.sleep(0.2)
            before, rows = rows, {row["id"] for row in host.ask("clients")}
        assert len(rows) > 1
        host.replace()
        assert {row["id"] for row in host.ask("clients")} == rows
        (tmp_path / "going").write_text("on\n")
        assert host.hear("ended") == ["outer", "0"]
        assert said.read_text() == "half\nwords\n"


def test_a_time_limit_goes_on_counting(tmp_path: Path) -> None:
    with hands(tmp_path, "one") as (one,):
        with replaced(tmp_path, one.spec(timeout_s=4.0)) as host:
            host.replace()
            assert host.hear("ended") == ["one", "143"]
            (row,) = host.events("child.exited")
            assert row["timed_out"]
