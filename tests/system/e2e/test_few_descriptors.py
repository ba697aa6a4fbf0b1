"""A child or a host with few descriptors left: only the request fails."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from supervisor.control.client import ControlError
from tests.helpers.command import SANDHOST, sandhost
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.toolupgrade import TELL, Tools, until

pytestmark = pytest.mark.slow

# Descriptors are used up, and given back, between two ATTACHes.
FULL = """
import os, sys
from vfs.client import Client
client = Client()
client.attach().disconnect()
client.listdir(".")
try:
    client.stat("missing")
except OSError:
    pass
held = []
try:
    while True:
        held.append(os.dup(2))
except OSError:
    pass
try:
    client.attach()
except OSError as why:
    print(why.errno, why.strerror)
for fd in held:
    os.close(fd)
print(client.listdir("."))
client.attach().ping()
print(client.ping())
"""

# An attaching child may have many; the relay that hands them on may not.
MANY = """
from vfs.client import Client
client, held = Client(), []
try:
    while True:
        held.append(client.attach())
except OSError as why:
    print(why.errno)
for one in (client, *held):
    one.ping()
print(0 < len(held) < 20)
"""


# spec T3, N4: one answer for each request, and the connection goes on.
@pytest.mark.parametrize("transport", ["socketpair", "pipes"])
def test_a_client_without_a_descriptor_for_it_keeps_its_door(
    tmp_path: Path, transport: str
) -> None:
    (tmp_path / "full.py").write_text(FULL)
    outcome = sandhost(
        "run", "--sandbox", "none", "--transport", transport, "--cwd", tmp_path,
        "--", "sh", "-c", 'ulimit -n 64; exec "$0" full.py', sys.executable,
    )  # fmt: skip
    assert (outcome.status, outcome.err) == (0, b"")
    first, *others = outcome.out.splitlines()
    assert first.startswith(b"24 the host attached a connection that this process has")
    assert others == [b"[]", b"None"]


# spec N3, N4: a lane's failure is that lane's, and one that is not begun is nobody's.
@pytest.mark.parametrize("depth", [1, 2])
def test_a_relay_without_a_descriptor_for_it_goes_on(
    tmp_path: Path, depth: int
) -> None:
    (tmp_path / "many.py").write_text(MANY)
    above = f"{SANDHOST} relay -- " * (depth - 1)
    own = "ulimit -S -n 1024; exec $0 many.py"
    script = f"ulimit -S -n 31; exec {SANDHOST} relay -- sh -c '{own}' $0"
    outcome = sandhost(
        "run", "--sandbox", "none", "--cwd", tmp_path, "--",
        "sh", "-c", f'exec {above} sh -c "$1" "$0"', sys.executable, script,
    )  # fmt: skip
    assert (outcome.status, outcome.err) == (0, b"")
    assert outcome.out.splitlines() == [b"24", b"True"]


# The failure, and the remedy.
@pytest.mark.parametrize("descriptors", [9, 10, 12, 14])
def test_a_relay_that_cannot_begin_says_what_to_do(descriptors: int) -> None:
    script = f"ulimit -n {descriptors}; exec {SANDHOST} relay -- true"
    outcome = sandhost("run", "--sandbox", "none", "--", "sh", "-c", script)
    assert outcome.status == 125
    assert outcome.err.startswith(b"sandhost relay: cannot ")
    assert outcome.err.endswith(b"(ulimit -n)\n")


# Opens what it may, says where its tools are, and stays.
GREEDY = """
import os, signal
from vfs.client import Client
print(os.environ["AIFO_TOOLEEXEC_URL"], os.environ["AIFO_TOOLEEXEC_TOKEN"])
client, held = Client(), []
try:
    while True:
        held.append(client.open("file", "r"))
except OSError as why:
    print(why.errno, len(held), flush=True)
signal.pause()
"""

HOST = """
[toolexec]
listen = ["unix"]
[sidecar.tools]
kind = "c-cpp"
allow = ["sh"]
workspace = "{where}"
[policy.greedy]
root = "{where}/root"
sandbox = "none"
limits = {{ open_files = 1000 }}
[policy.other]
sandbox = "none"
[child.greedy]
command = ["{python}", "{where}/greedy.py"]
policy = "greedy"
[child.one]
command = ["/bin/sh", "-c", '{tell}']
policy = "other"
"""


HOLDS = """
[policy.greedy]
root = "{where}/root"
sandbox = "none"
limits = {{ open_files = 1000 }}
[child.greedy]
command = ["{python}", "{where}/holding.py"]
policy = "greedy"
"""


@pytest.fixture
def small() -> Iterator[Daemon]:
    """A daemon that may have 512 descriptors; a child of its has opened what it may."""
    with tempfile.TemporaryDirectory(prefix="few-", dir="/tmp") as name:
        where = Path(name)
        (where / "root").mkdir()
        (where / "root" / "file").touch()
        (where / "greedy.py").write_text(GREEDY)
        config = HOST.format(where=name, python=sys.executable, tell=TELL)
        wrapper = ("sh", "-c", 'ulimit -n 512; exec "$0" "$@"')
        with daemon(where, config, wrapper=wrapper) as running:
            code, count = running.wait(lambda: running.log("greedy").split()[2:])
            assert (int(code), int(count) > 200) == (24, True)
            yield running
            assert running.end() == 0
            assert "ERROR" not in running.said()


# attack 18: files and tools are of one account, and leave the host its reserve.
def test_one_childs_files_and_tools_leave_others_theirs(small: Daemon) -> None:
    greedy, other = Tools(small, small.where, "greedy"), Tools(small, small.where)
    assert runs_tools(other)
    with ExitStack() as stack:
        statuses = [status_of_one_more(greedy, stack) for _ in range(60)]
        assert set(statuses) == {b"200", b"503"}
        # One at a time is there for it in any case.
        assert runs_tools(other)
        for name in ("two", "three", "four"):
            small.client.spawn(["/bin/sleep", "9"], name=name, policy="other")
        names = ("two", "three", "four")
        small.wait(lambda: all(small.row(name).state == "running" for name in names))
        other.replace()  # by its next program, which counts as this one did
        assert status_of_one_more(greedy, stack) == b"503"
        assert runs_tools(other)
    for name in names:
        small.client.stop_child(name)
    small.wait(
        lambda: that_run(greedy) == statuses.count(b"200"), "what was given back"
    )


# attack 18: so do children that are started beside what others have open.
def test_children_that_are_started_leave_others_theirs(small: Daemon) -> None:
    other = Tools(small, small.where)
    started: list[str] = []

    def start_one_more() -> None:
        name = f"more-{len(started)}"
        small.client.spawn(["/bin/sleep", "1000"], name=name, policy="other")
        started.append(name)

    start_one_more()
    with pytest.raises(ControlError, match="too few descriptors for one more child"):
        repeat(start_one_more, 40)
    assert runs_tools(other)
    assert all(small.row(name).state == "running" for name in started)
    small.client.stop_child(started[0])
    small.client.spawn(["/bin/sleep", "1000"], policy="other")


# Attaches and opens what it may, then takes what else a connection can: stays so.
HOLDING = """
import os, signal
from vfs.client import Client
client, lines, held = Client(), [], []
try:
    while len(lines) < {lines}:
        lines.append(client.attach())
except OSError:
    pass
own = [line.open(b"own%d" % n, "w") for n, line in enumerate(lines)]
try:
    while True:
        held.append(client.open("file", "r"))
except OSError as why:
    print(why.errno, len(lines) > 20, flush=True)
{take}
print("done", flush=True)
signal.pause()
"""

NARROWING = """
for count in range(60, 0, -1):
    names = [f"own{n}" for n in range(count)]
    try:
        client.narrow({"read": names})
    except OSError as why:
        assert "descriptors" in str(why), why
"""

DECLARING = """
for line, fileno in zip(lines, own):
    os.write(line.release(), b"WRITE %d 16777216\\nabc" % fileno)
"""


# attack 18, spec W3, A5: what NARROW holds, and payloads that go to files, count too.
@pytest.mark.parametrize(("lines", "take"), [(25, NARROWING), (45, DECLARING)])
def test_what_connections_hold_leaves_the_host_its_reserve(
    tmp_path: Path, lines: int, take: str
) -> None:
    root, script = tmp_path / "root", tmp_path / "holding.py"
    root.mkdir()
    (root / "file").touch()
    script.write_text(HOLDING.replace("{lines}", str(lines)).replace("{take}", take))
    config = HOLDS.format(where=tmp_path, python=sys.executable)
    wrapper = ("sh", "-c", 'ulimit -n 256; exec "$0" "$@"')
    with daemon(tmp_path, config, wrapper=wrapper) as running:
        said = running.wait(
            lambda: running.log("greedy").split()[2:] and running.log("greedy")
        )
        assert said == b"24 True\ndone\n"
        running.client.spawn(["/bin/sleep", "9"], name="two", policy="greedy")
        running.wait(lambda: running.row("two").state == "running")
        assert running.end() == 0
        assert "ERROR" not in running.said()


def repeat(work: Callable[[], None], times: int) -> None:
    """Do something so many times."""
    for _ in range(times):
        work()


def runs_tools(tools: Tools) -> bool:
    """Tell whether tools run, whichever way they are answered."""
    return [tools.run("echo 1", proto).body for proto in (1, 2)] == [b"1\n"] * 2


def that_run(tools: Tools) -> int:
    """Return how many of many tools run at once."""
    with ExitStack() as stack:
        return [status_of_one_more(tools, stack) for _ in range(60)].count(b"200")


def status_of_one_more(tools: Tools, stack: ExitStack) -> bytes:
    """Have one more tool run until the end of the stack; return its status."""
    sock = stack.enter_context(tools.begin("echo; exec sleep 1000"))
    return until(sock, b"\r\n").split()[1]
