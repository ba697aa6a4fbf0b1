"""A forked command is the same as a started one, as tests see it."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.command import ENVIRONMENT, TIMEOUT_S, finished, running
from tests.helpers.forkserver import ForkServer
from tests.system.e2e import older
from tests.system.e2e.fewer import allowing

pytestmark = pytest.mark.slow

SEEN = """
echo "$PWD"; env | sort; umask; ulimit -a; cat; readlink /proc/self/fd/0
for fd in /proc/self/fd/*; do echo "${fd##*/}"; done
grep -E '^(SigBlk|SigIgn|Groups|NoNewPrivs)' /proc/self/status; echo err >&2; exit 7
"""

DRAWN = re.compile(rb"sandhost-\w+|run/\w{12}")
"""The random names of a child's own directory and socket."""


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--sandbox", "none", "--", "sh", "-c", SEEN),
        ("run", "--", "sh", "-c", SEEN),
        ("run", "--", "sh", "-c", "kill -9 $$"),
        ("pipeline", "--", "echo", "a\udcffb", ":::", "cat"),
        ("run", "--bogus"),
        ("relay", "--", "true"),
        ("check-config", "none.toml"),
        ("ps", "--control", "none"),
        ("--help",),
        (),
    ],
    ids=lambda words: " ".join(words[:3]) or "nothing",
)
def test_it_ends_and_says_the_same(
    tmp_path: Path, words: tuple[str, ...], fork_server: ForkServer
) -> None:
    env = {**ENVIRONMENT, "HOME": str(tmp_path)}
    with running(*words, cwd=tmp_path, env=env) as process:
        started = finished(process)
    assert fork_server.takes(list(words), env)
    status, out, err = fork_server.run(list(words), str(tmp_path), env, TIMEOUT_S)
    assert status == started.status
    assert DRAWN.sub(b"*", out) == DRAWN.sub(b"*", started.out)
    assert err == started.err


# A process that has imported more than a host without a configuration does.
@pytest.mark.parametrize("kind", ["host", "command", "provider"])
def test_it_says_the_same_from_each_kind(
    tmp_path: Path, fork_server: ForkServer, kind: str
) -> None:
    words = ["run", "--", "sh", "-c", SEEN]
    env = {**ENVIRONMENT, "HOME": str(tmp_path)}
    with running(*words, cwd=tmp_path, env=env) as process:
        started = finished(process)
    forked = fork_server.run(words, str(tmp_path), env, TIMEOUT_S, kind=kind)
    assert (forked[0], forked[2]) == (started.status, started.err)
    assert DRAWN.sub(b"*", forked[1]) == DRAWN.sub(b"*", started.out)


# Steps of a wrapper are the fork's own; what an exec changes after them is changed.
@pytest.mark.parametrize("uid", [None, 0, 1000])
def test_it_says_the_same_after_steps(
    tmp_path: Path, fork_server: ForkServer, uid: int | None
) -> None:
    steps = older.without(444, 38) if uid is None else allowing("net=0", uid=uid)
    (tmp_path / "c.toml").write_text(
        "[sandbox.x]\nlayers = ['landlock', 'netns', 'seccomp']\n"
    )
    seen = "id -u; grep -E '^(Cap|Seccomp:|NoNewPrivs)' /proc/self/status; " + SEEN
    words = ["run", "--config", "c.toml", "--sandbox", "x", "--", "sh", "-c", seen]
    env = {**ENVIRONMENT, "HOME": str(tmp_path)}
    with running(*words, cwd=tmp_path, env=env, wrapper=steps) as process:
        started = finished(process)
    assert started.status == 7
    forked = fork_server.run(words, str(tmp_path), env, TIMEOUT_S, steps)
    assert (forked[0], forked[2]) == (started.status, started.err)
    assert DRAWN.sub(b"*", forked[1]) == DRAWN.sub(b"*", started.out)


def test_what_a_start_would_see_is_not_forked(
    monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer
) -> None:
    server = fork_server
    assert server.takes(["run"], ENVIRONMENT)
    assert not server.takes(["run\0"], ENVIRONMENT)
    assert not server.takes(["run"], {**ENVIRONMENT, "LANG": "C"})
    assert not server.takes(["run"], {**ENVIRONMENT, "PYTHONPATH": "/"})
    monkeypatch.setattr("tests.helpers.forkserver.os.geteuid", lambda: 12345)
    assert not server.takes(["run"], ENVIRONMENT)


def test_a_command_that_does_not_end_is_killed(fork_server: ForkServer) -> None:
    words = ["run", "--sandbox", "none", "--", "sleep", "1000"]
    with pytest.raises(subprocess.TimeoutExpired):
        fork_server.run(words, "/", ENVIRONMENT, 0.5)
