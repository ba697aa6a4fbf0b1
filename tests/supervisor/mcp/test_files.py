"""`sandhost mcp --files`.

An agent that knows nothing but MCP works in a workspace.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import supervisor
from tests.helpers.command import (
    ENVIRONMENT,
    SANDHOST,
    finished,
    heard,
    running,
    sandhost,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

mcp = pytest.importorskip("mcp")

CLIENT = """
import json, os, sys, trio
from mcp import ClientSession, StdioServerParameters, stdio_client

async def main():
    words = ["mcp", "--files"]
    server = StdioServerParameters(command="sandhost", args=words, env=dict(os.environ))
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        begun = await session.initialize()
        tools = (await session.list_tools()).tools
        found = [{"instructions": begun.instructions, "tools": [t.name for t in tools]}]
        for name, arguments in json.loads(sys.argv[1]):
            answer = await session.call_tool(name, arguments)
            found.append([answer.is_error, answer.content[0].text])
        print(json.dumps(found))

trio.run(main)
"""

PACKAGES = {
    str(Path(found).parent.parent) for found in (mcp.__file__, supervisor.__file__)
}
"""Where they are, if not beside the interpreter."""

Call = tuple[str, dict[str, object]]


class Agent:
    """The official client, as the child of a host, in a workspace.

    Attributes:
        base: of the workspace.
        told: the server's words on itself.
    """

    def __init__(self, where: Path) -> None:
        self.base = where / "repo"
        self.base.mkdir()
        self.told: dict[str, Any] = {}
        self._state = where / "state"

    def call(self, *calls: Call, options: tuple[str, ...] = ()) -> list[Any]:
        """Run one session; return (whether it failed, text) of each call."""
        env = {
            **ENVIRONMENT,
            "PATH": f"{os.path.dirname(SANDHOST)}:{ENVIRONMENT['PATH']}",
        }
        usual = ("--workspace", str(self.base), "--workspace-name", "w")
        where = ("--state-dir", str(self._state), *(options or usual))
        for place in PACKAGES:
            where += ("--expose", place)
        client = (sys.executable, "-c", CLIENT, json.dumps(calls))
        done = sandhost("run", *where, "--", *client, env=env)
        assert done.status == 0, done
        found: list[Any] = json.loads(done.out)
        self.told = found[0]
        return found[1:]

    def diff(self) -> str:
        """Return what the workspace has changed."""
        words = ("diff", "w", "--state-dir", str(self._state))
        return sandhost("workspace", *words).out.decode()


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(tmp_path)


# spec HM7
@pytest.mark.nobody
def test_an_agent_reads_edits_and_runs_in_its_workspace(agent: Agent) -> None:
    (agent.base / "a.py").write_text("def f():\n    return 1\n")
    answers = agent.call(
        ("list", {}),
        ("read", {"path": "a.py"}),
        ("edit", {"path": "a.py", "old": "return 1", "new": "return 2"}),
        ("write", {"path": "new/b.txt", "content": "héllo\n"}),
        ("search", {"pattern": "ret.rn"}),
        (
            "exec",
            {"command": "python3 -c 'import a; print(a.f())'; cat new/b.txt; exit 3"},
        ),
    )
    assert agent.told["tools"][:6] == [
        *("read", "write", "edit", "list", "search", "exec")
    ]
    assert str(agent.base) in agent.told["instructions"]
    assert answers == [
        [False, "a.py\t22"],
        [False, "def f():\n    return 1\n"],
        [False, "replaced 1 in a.py, the first in line 2"],
        [False, "wrote 7 bytes to new/b.txt"],
        [False, "a.py:2:    return 2"],
        [False, "2\nhéllo\n[exit status 3]"],
    ]
    assert "+    return 2\n" in agent.diff()
    assert (agent.base / "a.py").read_text().endswith("return 1\n")


def test_each_refusal_says_what_to_do(agent: Agent) -> None:
    (agent.base / "twice").write_text("x = 1\nx = 1\n")
    (agent.base / "binary").write_bytes(b"\0\1")
    os.mkfifo(agent.base / "pipe")
    answers = agent.call(
        ("edit", {"path": "twice", "old": "x = 1", "new": "x = 2"}),
        ("edit", {"path": "twice", "old": "y", "new": "z"}),
        ("edit", {"path": "twice", "old": "", "new": "z"}),
        ("edit", {"path": "twice", "old": "x = 1", "new": "x = 2", "all": True}),
        ("read", {"path": "binary"}),
        ("read", {"path": "pipe"}),
        ("write", {"path": "pipe", "content": ""}),
        ("read", {"path": "."}),
        ("read", {"path": "none"}),
        ("read", {"path": "twice", "offset": 9}),
        ("write", {"path": "/usr/a", "content": ""}),
        ("write", {"path": "a\0b", "content": ""}),
        ("list", {"path": "none"}),
        ("search", {"pattern": "(?=a)"}),
        ("search", {"pattern": "a", "path": "none"}),
        ("exec", {"command": "true", "cwd": "none"}),
        ("read", {"path": 1}),
        ("read", {"path": "twice", "more": 1}),
        ("exec", {"command": "a\0b"}),
        ("nothing", {}),
    )  # fmt: skip
    texts = [text for _, text in answers]
    assert [failed for failed, _ in answers] == [True] * 3 + [False] + [True] * 16
    assert texts[3] == "replaced 2 in twice, the first in line 1"
    said = [
        "the old text stands there 2 times; give more of the lines around it, or all=true",
        "the old text is not in it; read it again",
        "old is empty or the same as new",
        "replaced 2",
        "cannot read 'binary': it is no text; look at it by exec",
        "cannot read 'pipe': it is no file; use exec",
        "cannot write 'pipe': ",
        "cannot read '.': it is a directory; list it",
        "cannot read 'none': No such file or directory; look with list",
        "it has fewer than 9 lines; use a smaller offset",
        "; use a path beneath the working directory, or TMPDIR",
        "cannot write 'a\\x00b': embedded null byte",
        "cannot list 'none': No such file or directory",
        "RE2 has no look-around and no back references",
        "cannot search 'none': no such file or directory; look with list",
        "cannot run a command in 'none': No such file or directory",
        "cannot call read: Expected `str`, got `int` - at `$.path`; look at its schema",
        "Object contains unknown field `more`",
        "cannot run a command in '.': ",
        "",
    ]
    for text, expected in zip(texts, said, strict=True):
        assert expected in text


def test_answers_are_bounded_and_say_how_to_go_on(agent: Agent) -> None:
    (agent.base / "long").write_text("".join(f"line {n}\n" for n in range(1, 90_001)))
    (agent.base / "wide").write_text("x" * 3_000_000 + "\nlast\n")
    (agent.base / "many").mkdir()
    for number in range(1100):
        (agent.base / "many" / f"{number:04}").touch()
    loud = "seq 1 2000000; echo end >&2"
    answers = agent.call(
        ("read", {"path": "long"}),
        ("read", {"path": "long", "offset": 2001, "limit": 2}),
        ("read", {"path": "wide"}),
        ("list", {"path": "many"}),
        ("search", {"pattern": "line"}),
        ("search", {"pattern": "line 900", "glob": "*.py"}),
        ("search", {"pattern": "LINE 89999", "ignore_case": True}),
        ("exec", {"command": loud}),
    )
    assert all(not failed and len(text) < 33_000 for failed, text in answers)
    texts = [text for _, text in answers]
    assert texts[0].endswith("line 2000\n[more; go on with offset=2001]\n")
    assert texts[1] == "line 2001\nline 2002\n[more; go on with offset=2003]\n"
    assert texts[2] == "x" * 2000 + " [cut]\nlast\n"
    assert texts[3].endswith("0999\t0\n[100 more; use exec (ls, find)]")
    assert texts[4].count("\n") == 500
    assert texts[4].endswith("[more; search a smaller path or a longer pattern]")
    assert texts[5] == "[nothing]"
    assert texts[6] == "long:89999:line 89999"
    assert texts[7].startswith("1\n2\n3\n")
    assert "bytes left out]\n" in texts[7]
    assert texts[7].endswith("2000000\nend\n[exit status 0]")


# Processes of a command end with it: at its own end, at its time limit, whatever session
# it has made for itself.
def test_nothing_of_a_command_is_left(agent: Agent) -> None:
    left = "setsid sleep 1001 & sleep 1002 & echo $$"
    late = "sleep 1003 & trap '' TERM; while :; do sleep 0.1; done"
    answers = agent.call(
        ("exec", {"command": left}),
        ("exec", {"command": late, "timeout_s": 0.3}),
        ("exec", {"command": "kill -9 $$"}),
        ("exec", {"command": "cat /proc/[0-9]*/comm"}),
    )
    assert answers[0][1].endswith("[exit status 0]")
    assert answers[1][0]
    assert "[ended: its 0.3 s were up; give a longer timeout_s" in answers[1][1]
    assert answers[2] == [False, "[killed by signal 9]"]
    assert "sleep" not in answers[3][1].split()


SERVER = ("run", "--sandbox", "none", "--", SANDHOST, "mcp", "--files")


def _asked(number: int, method: str, params: dict[str, object]) -> bytes:
    row = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
    return json.dumps(row).encode() + b"\n"


BEGIN = _asked(
    1,
    "initialize",
    {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=str)
def test_a_command_ends_with_its_server(tmp_path: Path, number: int) -> None:
    with running(*SERVER, stdin=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdin is not None
        command = "echo $$ $PPID > pids; exec sleep 1004"
        params: dict[str, object] = {"name": "exec", "arguments": {"command": command}}
        process.stdin.write(BEGIN + _asked(2, "tools/call", params))
        process.stdin.flush()
        heard(process, b'"id":1')
        pids = tmp_path / "pids"
        while not (pids.exists() and pids.read_text().endswith("\n")):
            assert process.poll() is None
        sleeper, launchpad = map(int, pids.read_text().split())
        parent = (
            Path(f"/proc/{launchpad}/stat").read_text().rpartition(")")[2].split()[1]
        )
        os.kill(int(parent), number)
        assert finished(process).status == 128 + number
        assert not Path(f"/proc/{sleeper}").exists()


def test_outside_of_a_child_it_is_refused() -> None:
    done = sandhost("mcp", "--files")
    assert (done.status, done.out) == (2, b"")
    assert b"not inside a child" in done.err
    assert b"start it with sandhost run" in done.err
    assert done.err.count(b"\n") == 1
