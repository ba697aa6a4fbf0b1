"""Tools as a child has them: `sandhost run --config`, shims, curl and the client."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import Outcome, sandhost
from tests.helpers.hanging import hanging
from tests.helpers.toolruns import program

pytestmark = pytest.mark.slow

LISTENERS = ("'unix'", "'tcp://127.0.0.1:0'")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a root, tools and shims for them."""
    (tmp_path / "root").mkdir()
    program(tmp_path / "bin", "go", 'printf "%s|" "$@"; exit 7')
    program(tmp_path / "bin", "cargo", 'echo "$CARGO_HOME"; pwd; env')
    program(
        tmp_path / "bin",
        "loop",
        "trap 'echo got; exit 5' INT; echo ready\nwhile :; do sleep 0.05; done",
    )
    assert sandhost("shim", tmp_path / "root/shims", "--tool", "loop").status == 0
    return tmp_path


def run(place: Path, *command: str, more: str = "", **named: Any) -> Outcome:
    """Run a child whose PATH begins with shims."""
    listen = named.get("listen", LISTENERS[0])
    text = f"[toolexec]\nlisten = [{listen}]\n{more}"
    for kind in ("go", "rust", "c-cpp"):
        text += f"[sidecar.my-{kind}]\nkind = '{kind}'\npath = ['{place}/bin']\n"
        text += named.get(kind.replace("-", "_"), "")
    (place / "config.toml").write_text(text)
    root = place / "root"
    options = named.get("options", ())
    path = f"{root}/shims:{Path(sys.executable).parent}:/usr/bin:/bin"
    words = ("--config", place / "config.toml", "--root", root, "--cwd", root)
    return sandhost("run", *words, "--env", f"PATH={path}", *options, "--", *command)


# ToolExec 7: shims in a child, over either transport.
# spec E1: a child that its walls keep from the port is told of a socket of its own.
@pytest.mark.parametrize("network", ["none", "host"])
@pytest.mark.parametrize("listen", LISTENERS, ids=["unix", "tcp"])
def test_a_shim_in_a_child_runs_the_hosts_tool(
    place: Path, listen: str, network: str
) -> None:
    script = "go 'a b' '' 'é' '$(id)' \"$(printf 'x\\ny')\"; echo $?"
    options = ("--network", network)
    outcome = run(place, "sh", "-c", script, listen=listen, options=options)
    assert outcome.out.decode() == "a b||é|$(id)|x\ny|7\n"
    assert (outcome.status, outcome.err) == (0, b"")


# spec NET4, E1: a tool has its child's names, and none else.
@pytest.mark.parametrize("rules", [("--network", "a.example"), ()])
def test_a_tool_reaches_the_names_of_its_child(
    place: Path, rules: tuple[str, ...]
) -> None:
    look_up = "getent ahostsv4 a.example | head -n1; getent hosts b.example; echo $?"
    program(place / "bin", "go", look_up)
    outcome = run(place, "go", options=rules)
    lines = outcome.out.decode().splitlines()
    assert lines[-1] == "2"
    assert [line.split()[0] for line in lines[:-1]] == ["198.18.0.2"] * len(rules[:1])


# spec E1: of both it is told what its profile leaves it; in the host's network there is no
# namespace to listen in, whatever its profile has.
@pytest.mark.parametrize("more", ["", ", 'userns', 'netns'"], ids=["", "netns"])
def test_a_child_that_makes_no_unix_sockets_is_told_the_port(
    place: Path, more: str
) -> None:
    profile = (
        f"[sandbox.x]\nlayers = ['landlock', 'seccomp'{more}]\nunix_sockets = false\n"
    )
    options = ("--network", "host", "--sandbox", "x")
    both = ", ".join(LISTENERS)
    outcome = run(place, "go", more=profile, listen=both, options=options)
    assert (outcome.status, outcome.out, outcome.err) == (7, b"|", b"")


@pytest.mark.parametrize("listen", [*LISTENERS, ", ".join(LISTENERS)])
# spec E1, 3.1: whatever a profile does, its tools are in its reach; where all share a
# port it is that one, in its own net namespace.
def test_a_child_that_makes_no_unix_sockets_has_a_port_of_its_own(
    place: Path, listen: str
) -> None:
    layers = "['no_new_privs', 'landlock', 'seccomp', 'userns', 'netns']"
    profile = f"[sandbox.x]\nlayers = {layers}\nunix_sockets = false\n"
    script = 'echo "$AIFO_TOOLEEXEC_URL"; go a b'
    options = ("--network", "none", "--sandbox", "x")
    command = ("sh", "-c", script)
    outcome = run(place, *command, more=profile, listen=listen, options=options)
    url, said = outcome.out.decode().splitlines()
    assert (outcome.status, said, outcome.err) == (7, "a|b|", b"")
    assert url.startswith("http://127.0.0.1:")
    assert (url == "http://127.0.0.1:8087/exec") is ("tcp" not in listen)


@pytest.mark.parametrize(
    ("network", "listen", "more"),
    [
        ("none", LISTENERS[1], ""),
        ("host", LISTENERS[0], ""),
        ("host", LISTENERS[0], ", 'userns', 'netns'"),
    ],
)
# spec E1: a child is told a way that leads somewhere, or it is not started.
def test_a_child_with_no_way_to_its_tools_is_refused(
    place: Path, network: str, listen: str, more: str
) -> None:
    profile = (
        f"[sandbox.x]\nlayers = ['landlock', 'seccomp'{more}]\nunix_sockets = false\n"
    )
    options = ("--network", network, "--sandbox", "x")
    outcome = run(place, "true", more=profile, listen=listen, options=options)
    assert outcome.status == 125
    assert outcome.said("no way to its tools: its profile has unix_sockets = false")
    profile += "[policy.run]\ntools = []\n"
    script = 'echo "${AIFO_TOOLEEXEC_URL-none}"'
    command = ("sh", "-c", script)
    outcome = run(place, *command, more=profile, listen=listen, options=options)
    assert (outcome.status, outcome.out) == (0, b"none\n")


def test_a_tool_works_in_the_childs_directory(place: Path) -> None:
    (place / "root" / "sub").mkdir()
    outcome = run(place, "sh", "-c", "cd sub && cargo; cd / && cargo")
    lines = outcome.out.decode().splitlines()
    assert lines[0].endswith("/sidecar-my-rust/cargo")
    assert lines[1] == f"{place}/root/sub"
    assert b"AIFO_TOOLEEXEC_TOKEN" not in outcome.out  # attack 24
    assert b"FSPROXY" not in outcome.out
    assert lines[-1] == "bad request: cwd is not a directory beneath /workspace"


def test_refusals_have_their_words(place: Path) -> None:
    more = "[policy.run]\ntools = ['go', 'npm']\n"
    outcome = run(place, "sh", "-c", "go; cargo; npm; echo $?", more=more)
    lines = outcome.out.decode().split("|", 1)[1].splitlines()
    assert lines[0].startswith("forbidden: tool 'cargo' is not permitted")
    assert lines[1] == (
        "tool 'npm' not available in running sidecars; start an appropriate toolchain"
        " (e.g., --toolchain node)"
    )
    assert lines[2] == "86"


def test_a_signal_reaches_the_tool(place: Path) -> None:
    allow = "allow = ['loop']\n"
    script = (
        "cd $TMPDIR; mkfifo said; (cd - >/dev/null; exec loop) >said & exec 4<said;"
        " read -r line <&4; kill -TERM $!; wait $!; echo $? $line"
    )
    outcome = run(place, "sh", "-c", script, c_cpp=allow)
    assert outcome.out == b"143 ready\n"


def test_the_client_in_a_child(place: Path) -> None:
    code = (
        "from vfs.client.tools import ToolClient, ToolError\n"
        "tools = ToolClient()\n"
        "done = tools.run('go', 'a', b'\\xff', detach=True)\n"
        "print(done.exit_code, done.output)\n"
        "late = tools.attach(done.exec_id, 1)\n"
        "print(b''.join(late), late.exit_code)\n"
        "with tools.start('loop') as loop:\n"
        "    print(next(iter(loop)), loop.signal('INT'), loop.wait())\n"
        "    print(loop.signal('INT'))\n"
        "try:\n"
        "    tools.run('nosuch')\n"
        "except ToolError as why:\n"
        "    print(why.status, why.exit_code)\n"
    )
    outcome = run(place, sys.executable, "-c", code, c_cpp="allow = ['loop']\n")
    assert outcome.out.decode().splitlines() == [
        "7 b'a|\\xff|'",
        "b'|\\xff|' 7",
        "b'ready\\n' True 5",
        "False",
        "403 86",
    ]


# ToolExec 6: FD 3 is not passed into tools unless the sidecar says so.
def test_a_tool_has_the_door_only_if_its_sidecar_says_so(place: Path) -> None:
    script = (
        'echo "${FSPROXY_FD-none}"; if [ -e /proc/self/fd/3 ]; then echo open; fi;'
        ' printf "OPEN note r false\\n" >&3 && read -r reply <&3 && echo "$reply"'
    )
    program(place / "bin", "go", script)
    (place / "root" / "note").write_text("x")
    closed = run(place, "go")
    assert closed.out.startswith(b"none\n")
    assert b"OK" not in closed.out
    opened = run(place, "go", go="fd3 = true\n")
    lines = opened.out.decode().splitlines()
    assert lines[:2] == ["3", "open"]
    assert lines[2].startswith("OK ")
    assert opened.status == 0


# attack 38; spec A5, I8: what a nested child was not left, no tool does for it.
# spec E37
def test_the_tools_of_a_narrowed_child_do_not_reach_its_parents_files(
    place: Path,
) -> None:
    program(place / "bin", "go", "cat note shared 2>/dev/null")
    (place / "root" / "note").write_text("secret\n")
    (place / "root" / "open").mkdir()
    (place / "shared").mkdir()
    (place / "shared" / "shared").write_text("everybody's\n")
    code = (
        "from vfs.client.tools import ToolClient, ToolError\n"
        "try:\n"
        "    print(ToolClient().run('go', cwd='/workspace').output)\n"
        "except ToolError as why:\n"
        "    print(why.status)\n"
    )
    nested = ("--", sys.executable, "-c", code)
    assert run(place, "sandhost", "relay", *nested).out == b"b'secret\\n'\n"
    less = ("sandhost", "relay", "--read", "open", *nested)
    assert run(place, *less).out == b"403\n"
    shared = f"workspace = '{place}/shared'\n"
    assert run(place, *less, go=shared).out == b'b"everybody\'s\\n"\n'
    # There a tool has all that the child's own connection has.
    assert run(place, *less, go=f"{shared}fd3 = true\n").out == b"403\n"


# spec A5: what a child gives up of its own connection its tools have not either.
# spec E37
def test_a_child_that_gives_its_root_up_has_no_tools_in_it(place: Path) -> None:
    code = (
        "from vfs.client import Client\n"
        "from vfs.client.tools import ToolClient, ToolError\n"
        "tools = ToolClient()\n"
        "less = ToolClient(token=tools.narrowed_token(tools=['go']))\n"
        "print(less.run('go', 'a', cwd='/workspace').output)\n"
        "def tell(client, tool):\n"
        "    try:\n"
        "        print(client.run(tool, cwd='/workspace').exit_code)\n"
        "    except ToolError as why:\n"
        "        print(why.status, str(why).strip())\n"
        "tell(less, 'cargo')\n"
        "client = Client()\n"
        "client.narrow({'read': ['.'], 'write': ['.']})\n"
        "tell(tools, 'go')\n"
        "client.narrow({'read': ['.']})\n"
        "tell(tools, 'go')\n"
    )
    outcome = run(place, sys.executable, "-c", code)
    lines = outcome.out.decode().splitlines()
    assert lines[0] == "b'a|'", outcome
    assert lines[1].startswith("403 ")
    assert lines[2] == "7"
    assert lines[3].startswith("403 ")
    assert "narrowed rights" in lines[3]


HANGS = """
ask() {
  curl -s -H "X-Aifo-Proto: 1" -H "Authorization: Bearer $AIFO_TOOLEEXEC_TOKEN" \\
    --unix-socket "${AIFO_TOOLEEXEC_URL#unix://}" http://localhost/exec "$@"
}
for number in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18; do
  ask --max-time 3 -d tool=cargo &
done
sleep 2
ask --max-time 60 -d tool=go -d arg=on
wait
ask -d tool=go -d arg=and
"""


@pytest.mark.parametrize("walls", ["none", "auto"])
# spec S5: an exec that hangs hangs alone, however many there are; who asked for it and has
# gone is not waited for (E25).
def test_tools_whose_exec_hangs_keep_nobody(place: Path, walls: str) -> None:
    with hanging(place / "bin", "cargo"):
        outcome = run(place, "sh", "-c", HANGS, options=("--sandbox", walls))
    assert (outcome.status, outcome.out, outcome.err) == (0, b"on|and|", b"")
