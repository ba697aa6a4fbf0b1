"""A child with a workspace as FD 3's root notices no exchange of its host."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from supervisor.workspace.run import prepare_use
from tests.helpers.daemon import daemon
from tests.helpers.replacing import Hand, assert_clean, hands, replaced
from tests.helpers.stage import CHILDREN, PYTHON
from tests.helpers.toolupgrade import TELL, Tools

pytestmark = pytest.mark.slow

OPERATOR = 1234


def prepared(hand: Hand, where: Path, **changes: Any) -> dict[str, Any]:
    """Describe a child with a fresh workspace of another user as its root."""
    base = where / "repo"
    base.mkdir()
    (base / "a").write_text("base\n")
    if os.geteuid() == 0:
        os.chown(base, OPERATOR, OPERATOR)
    use = prepare_use(str(base), "review", str(where / "state"), "w")
    return hand.spec(
        command=[*PYTHON, "-c", (CHILDREN / "puppet.py").read_text()],
        cwd=str(base),
        root=str(base),
        sandbox="auto",
        workspaces=[msgspec.to_builtins(use)],
        has_workspace_root=True,
        **changes,
    )


# spec WS2, WS3, WS18
@pytest.mark.nobody
@pytest.mark.parametrize("publish", ["direct", "on-close"])
def test_a_root_that_is_a_workspace_goes_on(tmp_path: Path, publish: str) -> None:
    tmp_path.chmod(0o755)
    with hands(tmp_path, "one") as (hand,):
        spec = prepared(hand, tmp_path, publish=publish)
        with replaced(tmp_path, spec) as host:
            assert hand.ask(b"OPEN open w false\n") == b"OK 1000"
            assert hand.ask(b"WRITE 1000 4\nold\n") == b"OK 4"
            before = len(host.descriptors())
            for _ in range(2):
                host.replace()
            assert len(host.descriptors()) <= before + 2
            host.assert_no_leaks()
            assert hand.ask(b"WRITE 1000 4\nnew\n") == b"OK 4"
            assert hand.ask(b"CLOSE 1000\n") == b"OK"
            assert hand.ask(b"OPEN later w false\n").startswith(b"OK ")
            seen = (
                "sorted((e.name, e.stat().st_uid == os.getuid()) for e in os.scandir())"
            )
            last = [("later", True)] if publish == "direct" else []
            assert hand.do(seen) == [("a", os.geteuid() != 0), *last, ("open", True)]
            assert hand.do("open('open').read()") == "old\nnew\n"
            assert hand.do("open('calls', 'w').write('x')") == 1
            assert hand.ask(b"OPEN calls r false\n").startswith(b"OK ")
            assert hand.ask(b"OPEN ../state r false\n").startswith(b"ERROR")
            upper = tmp_path / "state/workspaces/w/upper"
            owners = {path.stat().st_uid for path in upper.iterdir()}
            assert owners == {OPERATOR if os.geteuid() == 0 else os.geteuid()}
    assert os.listdir(tmp_path / "repo") == ["a"]


CONFIG = """
[toolexec]
listen = ["unix"]
[sidecar.tools]
kind = "c-cpp"
allow = ["sh"]
[workspace.repo]
base = "{base}"
[policy.p]
workspace = ["repo"]
[child.one]
command = ["sh", "-c", {script}]
policy = "p"
"""


# spec WS2, WS5: of a daemon; tools and FD 3 have the workspace before and after.
@pytest.mark.nobody
def test_tools_and_fd_3_of_a_daemon_go_on() -> None:
    script = (
        f"echo calls > calls; printf 'OPEN door w false\\n' >&3; read -r _ <&3;{TELL}"
    )
    with tempfile.TemporaryDirectory(prefix="su-", dir="/tmp") as name:
        where = Path(name)
        (where / "repo").mkdir()
        config = CONFIG.format(base=where / "repo", script=json.dumps(script))
        with daemon(where, config) as running:
            tools = Tools(running, where)
            for number in range(2):
                said = tools.run(f"pwd; echo {number} >> tool; ls; cat tool").body
                listed = "calls\ndoor\ntool\n" + "".join(
                    f"{i}\n" for i in range(number + 1)
                )
                assert said.decode() == f"{where}/repo\n{listed}"
                tools.replace()
            assert_clean(running)
            assert running.end() == 0
        assert os.listdir(where / "repo") == []


TELLING = """
import os, runpy, sys
from pathlib import Path

from supervisor.children import child, child_workspaces
from supervisor.host import Host
from supervisor.sandbox.plan import Machine

def tell(owner, name):
    do = getattr(owner, name)
    def told(*args, **named):
        with Path({path!r}).open("a") as file:
            print(name, file=file)
        return do(*args, **named)
    setattr(owner, name, told)

tell(Machine, "give_user_back")
tell(Host, "give_groups_back")
tell(child_workspaces, "record_end")
tell(child, "close_places")
runpy.run_path({program!r})
"""
"""A next program that tells what it gives back of a child, in its order."""


# Else the next child may get the user while the changes are still being recorded.
@pytest.mark.nobody
def test_a_child_that_goes_on_gives_its_user_back_last(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    told, program = tmp_path / "told", tmp_path / "telling.py"
    replacing = str(CHILDREN / "replaced.py")
    program.write_text(TELLING.format(path=str(told), program=replacing))
    with hands(tmp_path, "one") as (hand,):
        with replaced(tmp_path, prepared(hand, tmp_path)) as host:
            host.next_is(f'exec {sys.executable} -I {program} "$@"')
            host.replace()
            assert hand.ask(b"PING\n") == b"OK"
            hand.tell("os._exit(0)")
            assert host.wait() == 0
    order = ["close_places", "record_end", "give_groups_back", "give_user_back"]
    given_back = told.read_text().split()
    # Here a child may have no groups, and none has a user but of a host that is root.
    assert given_back == [name for name in order if name in given_back]
    assert set(given_back) >= {"close_places", "record_end"}
