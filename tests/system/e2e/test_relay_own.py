"""A nested child of `sandhost relay` has its own TMPDIR and executions."""

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.command import SANDHOST, Outcome, sandhost
from tests.helpers.toolruns import program
from tests.system.e2e.older import without
from tests.system.e2e.test_relay import has_landlock, run_child

pytestmark = pytest.mark.slow

# One nested child waits, with a file of its own, while another one looks for it.
FAMILY = """
echo the parent\\'s > $TMPDIR/file
mkfifo $TMPDIR/in $TMPDIR/out
$0 relay -- sh -c 'echo "A" > $TMPDIR/a; echo $TMPDIR; read line; cat $TMPDIR/a' \\
  < $TMPDIR/in > $TMPDIR/out &
exec 4> $TMPDIR/in 5< $TMPDIR/out
read -r other <&5
$0 relay -- sh -c '
  for file in $1/a $2/file; do
    cat $file; echo x > $file; echo x >> $file; rm -f $file; mv $file $TMPDIR/taken
    ln $file $TMPDIR/linked; ln -s $file $TMPDIR/link; cat $TMPDIR/link
  done
  for place in $1 $2; do ls $place; echo x > $place/new; mkdir $place/dir; done
  mv $1 $2/moved; rm -rf $1
  echo own > $TMPDIR/own && cat $TMPDIR/own
  echo $TMPDIR' sh $other $TMPDIR 2> $TMPDIR/refused
echo >&4
cat <&5
wait
echo $other
cat $TMPDIR/file
ls -A $TMPDIR
"""


# attack 48: siblings, and the child that they run in, have their files to themselves.
@pytest.mark.skipif(not has_landlock(), reason="this kernel has no Landlock")
def test_nested_children_do_not_reach_each_others_directories(tmp_path: Path) -> None:
    status, out, err = run_child(tmp_path, FAMILY, "--cwd", "/")
    assert (status, err) == (0, b"")
    own, where, a, other, file, *left = out.decode().splitlines()
    assert (own, a, file) == ("own", "A", "the parent's")
    assert where != other
    # Each in its parent's, and gone with the nested child.
    assert os.path.dirname(where) == os.path.dirname(other)
    assert left == ["file", "in", "out", "refused"]


# attack 48: whatever it leaves there, and however it ends.
def test_the_directory_of_a_nested_child_ends_with_it(tmp_path: Path) -> None:
    script = (
        "$0 relay -- sh -c 'mkdir -p $TMPDIR/x/y; touch $TMPDIR/x/y/z; ln -s / $TMPDIR/l;"
        " setsid sleep 1000 & chmod 0 $TMPDIR/x; kill -9 $$'; echo $?; ls -A $TMPDIR"
    )
    assert run_child(tmp_path, script) == (0, b"137\n", b"")
    # One level in another.
    script = "$0 relay -- " * 3 + "sh -c 'echo $TMPDIR'; ls -A $TMPDIR"
    status, out, err = run_child(tmp_path, script)
    assert (status, err) == (0, b"")
    (where,) = out.decode().splitlines()
    assert where.count("/nested-") == 3


# Where COMMAND is in bubblewrap, say, TMPDIR may be nobody's to write.
def test_a_nested_child_has_no_directory_where_its_parent_has_none(
    tmp_path: Path,
) -> None:
    nested = "$0 relay -- sh -c 'echo ${TMPDIR-none}'"
    status, out, err = run_child(tmp_path, f"TMPDIR=$TMPDIR/gone {nested}")
    assert (status, out) == (0, b"none\n")
    assert b"The nested child has no TMPDIR: " in err
    assert b"/gone': No such file or directory; set it to a directory" in err
    assert run_child(tmp_path, f"unset TMPDIR; {nested}") == (0, b"none\n", b"")


# attack 48: where there is no room for one, it does not get its parent's.
def test_a_nested_child_without_room_for_its_directory_is_refused(
    tmp_path: Path,
) -> None:
    script = "TMPDIR=$TMPDIR/$1 $0 relay -- true"
    words = ("run", "--root", tmp_path, "--", "sh", "-c", script, SANDHOST, "x" * 256)
    outcome = sandhost(*words)
    assert (outcome.status, outcome.out) == (125, b"")
    assert outcome.said("cannot make a directory for the nested child: ")
    assert outcome.said(": File name too long")


# attack 48: what is not kept is said.
def test_without_landlock_it_is_told_that_nothing_keeps_them_apart(
    tmp_path: Path,
) -> None:
    words = ("--cwd", "/", "--", "sh", "-c", 'sandhost relay -- sh -c "echo $TMPDIR"')
    outcome = sandhost("run", "--root", tmp_path, *words, wrapper=without(444, 38))
    assert outcome.status == 0
    assert outcome.said("nor from its files")


CODE = """
import subprocess, sys
from vfs.client.tools import ToolClient, ToolError
tools = ToolClient()
OTHER = '''
import sys
from vfs.client.tools import ToolClient, ToolError
tools = ToolClient()
for exec_id in sys.argv[1:]:
    for ask in (lambda: b"".join(tools.attach(exec_id)), lambda: tools.signal(exec_id, "KILL")):
        try:
            print(ask())
        except ToolError as why:
            print(why.status)
'''
WAITS = '''
from vfs.client.tools import ToolClient
tools = ToolClient()
with tools.start("loop") as loop:
    next(iter(loop))
    print(loop.id, flush=True)
    input()
    print(loop.signal("INT"), loop.wait())
'''
def relayed(code, *words, **named):
    command = ["sandhost", "relay", "--", sys.executable, "-c", code, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=(3,), **named)
with tools.start("loop") as own:
    next(iter(own))
    sibling = relayed(WAITS, stdin=subprocess.PIPE)
    exec_id = sibling.stdout.readline().strip()
    print(relayed(OTHER, exec_id, own.id).communicate()[0].split())
    print(sibling.communicate("\\n")[0].strip())
    print(own.signal("INT"), own.wait())
"""


# attack 48, spec E37: executions, logs and signals of a nested child are its own.
def test_nested_children_do_not_see_each_others_executions(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    trap = "trap 'echo got; exit 5' INT; echo ready\nwhile :; do sleep 0.05; done"
    program(tmp_path / "bin", "loop", trap)
    text = (
        "[toolexec]\nlisten = ['unix']\n[sidecar.s]\nkind = 'c-cpp'\nallow = ['loop']\n"
    )
    (tmp_path / "c.toml").write_text(f"{text}path = ['{tmp_path}/bin']\n")
    outcome: Outcome = sandhost(
        "run", "--config", tmp_path / "c.toml", "--root", tmp_path / "root",
        "--cwd", tmp_path / "root", "--", sys.executable, "-c", CODE,
    )  # fmt: skip
    said = outcome.out.decode().splitlines()
    assert said[:1] == ["['404', 'False', '404', 'False']"], outcome
    assert said[1:] == ["True 5", "True 5"]
