"""A fleet whose directory has its store in a PostgreSQL: kills, and another head."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.helpers import postgres
from tests.helpers.command import Outcome, sandhost
from tests.helpers.daemon import daemon
from tests.system.e2e.test_fleet_ray import (
    Place,
    assert_nothing_left,
    free_port,
    kill,
    new_actor,
    pids_of,
    place,
    row_of,
    until,
)

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(590)]

FLEET = """
[fleet]
lease = "12s"
store = "{address}"
[fleet.quota]
max_tokens = 5000
window = "never"
"""


@pytest.fixture
def server() -> Iterator[postgres.Server]:
    """A server for one test, which may kill it."""
    with postgres.server() as one:
        yield one


def config(address: str) -> str:
    """Return a daemon's configuration, for `place`."""
    return FLEET.format(address=address)


def up(one: Place) -> tuple[str, str]:
    """Begin a fleet; return its address and the file of its token."""
    port = str(free_port())
    done = one.fleet("up", "--node", one.name, "--port", port, "--json")
    assert (done.status, done.err) == (0, b"")
    address, token = json.loads(done.out).values()
    return address, token


def join(one: Place, address: str, token: str) -> None:
    """Join a fleet, from another address of this machine."""
    words = ("--address", address, "--token-file", token, "--bind", "127.0.0.2")
    done = one.fleet("join", "--node", one.name, *words)
    assert done.status == 0, done.err


def is_up(asked: Place, *names: str) -> bool:
    """Return whether the fleet answers, with these nodes up."""
    done = asked.fleet("ps", "--json")
    if done.status:
        return False
    nodes = {row["name"]: row["state"] for row in json.loads(done.out)["nodes"]}
    return all(nodes.get(name) == "up" for name in names)


def epoch(server: postgres.Server, base: str) -> int:
    """Return the epoch of a store."""
    return int(server.run("SELECT number FROM sandhost_fleet_epoch", base)[0][0])


# spec FL2
def test_a_store_that_cannot_be_had_refuses_up_and_leaves_nothing(
    server: postgres.Server,
) -> None:
    with place("a", config(server.address_of("none"))) as a:
        done = a.fleet("up", "--node", "a", "--port", str(free_port()))
        assert done.status == 1
        assert done.said("cannot open the fleet's store, database 'none' at 127.0.0.1:")
        assert server.password.encode() not in done.err
        assert_nothing_left(a)


# spec FL2
@pytest.mark.chaos
def test_a_directory_outlives_its_process_its_server_and_its_head(
    server: postgres.Server,
) -> None:
    base = server.make_base()
    text = config(server.address_of(base))
    with place("a", text) as a, place("b", text) as b, place("c", text) as c:
        address, token = up(a)
        join(b, address, token)
        check_secret(server, a, b)
        for name, restart in (("one", "always"), ("two", "no"), ("three", "always")):
            words = ("--name", name, "--restart", restart, "--", "sleep", "600")
            assert a.fleet("spawn", *words).status == 0
        nodes = {row["name"]: row["node"] for row in a.shown()["children"]}
        assert nodes == {"one": "a", "two": "b", "three": "a"}
        check_process(server, base, a, b)
        check_server(server, a, b)
        check_raylet(server, base, a, b)
        check_takeover(server, base, a, b, c)
        for one in (b, a):
            one.fleet("leave")
        assert c.fleet("down").status == 0
        assert_nothing_left(c)


def check_secret(server: postgres.Server, *places: Place) -> None:
    """Look for the password in all command lines, environments and files of the nodes."""
    secret = server.password.encode()
    for process in Path("/proc").glob("[0-9]*"):
        for part in ("cmdline", "environ"):
            try:
                assert secret not in (process / part).read_bytes()
            except OSError:
                continue
    for one in places:
        files = [path for path in one.where.rglob("*") if path.is_file()]
        assert not [path for path in files if secret in path.read_bytes()]


def check_process(server: postgres.Server, base: str, a: Place, b: Place) -> None:
    """Kill the directory's process: it begins anew on the head, under a new epoch."""
    before, pids = a.shown(), running(a)
    was = epoch(server, base)
    (pid,) = pids_of(a.directory, "ray::Directory")
    kill(pid)
    until(partial(new_actor, a.directory, "Directory", pid))
    until(lambda: is_up(b, "a", "b"))
    assert epoch(server, base) == was + 1
    assert not pids_of(b.directory, "ray::Directory")
    after = a.shown()
    sessions = [[node["session"] for node in one["nodes"]] for one in (before, after)]
    assert sessions[0] == sessions[1]
    assert running(a) == pids


def check_server(server: postgres.Server, a: Place, b: Place) -> None:
    """Kill the server: commands say why nothing is done, until it is back."""
    server.kill()
    until(lambda: a.fleet("ps").status == 1)
    until(lambda: a.fleet("ps").said("cannot open the fleet's store, database"))
    until(lambda: is_refused(b.fleet("spawn", "--name", "lost", "--", "true")))
    server.start()
    until(lambda: is_up(b, "a", "b"))
    assert "lost" not in running(a)
    until(lambda: row_of(a, "one")["state"] == "running")
    assert a.fleet("spawn", "--name", "later", "--node", "b", "--", "true").status == 0


def is_refused(done: Outcome) -> bool:
    """Tell whether an order was refused for want of the store, which is not there."""
    assert done.status == 1
    return done.said("cannot open the fleet's store, database")


def check_raylet(server: postgres.Server, base: str, a: Place, b: Place) -> None:
    """Kill the head's raylet and let its GCS live: the directory moves to the other."""
    was = epoch(server, base)
    # It would end the GCS with its raylet, within a second.
    (starter,) = pids_of(a.directory, "supervisor.cluster.setup")
    os.kill(starter, signal.SIGSTOP)
    (raylet,) = pids_of(a.directory, "/raylet/raylet")
    kill(raylet)
    assert pids_of(a.directory, "gcs_server")
    until(lambda: not pids_of(a.directory, "ray::NodeActor"))
    until(lambda: bool(pids_of(b.directory, "ray::Directory")))
    until(lambda: is_up(b, "b"))
    assert epoch(server, base) > was
    until(lambda: row_of(b, "one")["node"] == "b")
    until(lambda: row_of(b, "one")["state"] == "running")


def check_takeover(
    server: postgres.Server, base: str, a: Place, b: Place, c: Place
) -> None:
    """Lose the head's machine: `up` on another one has all that was stored."""
    was = epoch(server, base)
    known = {row["name"]: row["incarnation"] for row in b.shown()["children"]}
    kill(a.daemon.process.pid)
    for pid in pids_of(a.directory, ""):
        kill(pid)
    address, token = up_when_free(b, c)
    assert epoch(server, base) > was
    shown = {row["name"]: row for row in c.shown()["children"]}
    assert shown.keys() == known.keys()
    assert b.fleet("leave").said("Ray here is ended")
    join(b, address, token)
    until(lambda: c.states() == {"a": "lost", "b": "up", "c": "up"})
    for name in ("one", "three"):
        until(partial(is_running_again, c, name, known[name]))
    assert row_of(c, "two")["state"] == "lost"
    (account,) = json.loads(c.fleet("quota", "--json").out)["accounts"]
    assert (account["limit"], account["spent"]) == (5000, 0)
    assert c.fleet("forget", "a").status == 0


def up_when_free(b: Place, c: Place) -> tuple[str, str]:
    """End the directory where it has moved to, and begin a fleet on the third one."""
    for pid in pids_of(b.directory, ""):
        kill(pid)
    return up(c)


def is_running_again(one: Place, name: str, before: int) -> bool:
    """Return whether a child runs in a later incarnation."""
    row = row_of(one, name)
    return bool(row["state"] == "running" and row["incarnation"] > before)


def running(one: Place) -> dict[str, int]:
    """Return the pids of the children that run."""
    rows = one.shown()["children"]
    return {row["name"]: row["pid"] for row in rows if row["state"] == "running"}


LOOKING = """
[fleet]
store = "postgresql://u@db.invalid/fleet?passfile={file}"
[policy.looks]
read = ["{where}"]
"""


# spec FL2, L13: no child reads the file of the password, whatever its policy lets it read.
def test_no_child_reads_the_password_of_the_store() -> None:
    with tempfile.TemporaryDirectory(prefix="fs-", dir="/tmp") as name:
        shown = Path(name, "shown")
        shown.mkdir()
        (shown / "other").write_text("seen")
        file = shown / "pgpass"
        file.write_text("*:*:*:u:sesame-open\n")
        file.chmod(0o600)
        with daemon(Path(name), LOOKING.format(file=file, where=shown)) as one:
            script = f"cat {shown}/other {file}; cp {file} $TMPDIR; echo over"
            words = ("--policy", "looks", "--name", "x")
            control = ("--control", f"{name}/run/control")
            done = sandhost("spawn", *control, *words, "--", "sh", "-c", script)
            assert done.status == 0, done.err
            until(lambda: b"over" in sandhost("logs", *control, "x").out)
            said = sandhost("logs", *control, "x").out
            assert b"seen" in said
            assert said.count(b"Permission denied") == 2
            assert b"sesame" not in said
            assert one.process.poll() is None
