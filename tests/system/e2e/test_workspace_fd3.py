"""FD 3's root is the workspace.

By the door and by system calls a child sees one tree.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.command import ENVIRONMENT, SANDHOST, Outcome, sandhost
from tests.helpers.provider import key_file, provider_process

pytestmark = pytest.mark.slow

OPERATOR = 1234
IS_ROOT = os.geteuid() == 0
of_root = pytest.mark.skipif(not IS_ROOT, reason="it takes a host that is root")

HEAD = "import os; from vfs.client import *; door = Client()\n"


class Scene:
    """A base of another user, if the host is root, and a state directory."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.base = top / "repo"
        self.base.mkdir()
        (self.base / "a.txt").write_text("hello\n")
        if IS_ROOT:
            for path in (self.base, self.base / "a.txt"):
                os.chown(path, OPERATOR, OPERATOR)

    def words(self, *options: str, mode: str = "") -> list[str]:
        """Return the words of a run in the workspace ``w``."""
        state = str(self.top / "state")
        where = f"{self.base}{mode}"
        given = ["run", "--state-dir", state, "--workspace", where]
        name = [] if mode else ["--workspace-name", "w"]
        return [*given, *name, *options, "--"]

    def run(self, script: str, *options: str, mode: str = "") -> Outcome:
        """Run a Python script that has the door as ``door``."""
        words = self.words(*options, mode=mode)
        return sandhost(*words, sys.executable, "-c", HEAD + script)

    def ask(self, *words: str) -> Outcome:
        """Run ``sandhost workspace``."""
        state = str(self.top / "state")
        return sandhost("workspace", *words, "--state-dir", state)

    def configured(self, text: str) -> tuple[str, str]:
        """Return the options for a configuration."""
        path = self.top / "config.toml"
        path.write_text(text)
        return "--config", str(path)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@contextmanager
def started(
    scene: Scene, script: str, *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run of which the child says one line when it is ready."""
    process = subprocess.Popen(
        [SANDHOST, *scene.words(*options), sys.executable, "-c", HEAD + script],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


BOTH_WAYS = """
def by_calls(name): return open(name).read()
def by_door(name):
    with door.open_file(name) as file: return file.read().decode()
def put(name, text, mode='w'):
    with door.open_file(name, mode) as file: file.write(text.encode())

assert by_door('a.txt') == 'hello\\n' == by_door(os.path.abspath('a.txt'))
put('door', 'by the door\\n'); assert by_calls('door') == 'by the door\\n'
open('calls', 'w').write('by calls\\n'); assert by_door('calls') == 'by calls\\n'
put('a.txt', 'more\\n', 'a'); assert by_calls('a.txt') == 'hello\\nmore\\n'
open('a.txt', 'a').write('and more\\n')
assert by_door('a.txt') == 'hello\\nmore\\nand more\\n'
door.rename('calls', 'renamed'); assert by_calls('renamed') == 'by calls\\n'
os.rename('renamed', 'again'); assert by_door('again') == 'by calls\\n'
door.remove('again'); assert not os.path.exists('again')
door.mkdir('d'); open('d/x', 'w').close(); assert door.stat('d/x').size == 0
os.remove('d/x'); assert door.listdir('d') == []
os.rmdir('d')
held = door.open('a.txt', 'r+'); os.truncate('a.txt', 3)
assert door.read(held, 100) == b'hel'
door.seek(held, 0); door.write(held, b'H'); assert by_calls('a.txt') == 'Hel'
mine = os.getuid(), os.getgid()
assert all((s := os.stat(n)).st_uid == mine[0] and s.st_gid == mine[1]
           for n in ('a.txt', 'door')), os.stat('door')
print('ok')
"""


# spec WS2, WS5
@pytest.mark.nobody
def test_what_is_written_by_one_way_is_seen_by_the_other(scene: Scene) -> None:
    done = scene.run(BOTH_WAYS)
    assert (done.out, done.status) == (b"ok\n", 0), done.err
    assert (scene.base / "a.txt").read_text() == "hello\n"
    assert scene.ask("diff", "w", "--name-only").out == b"a.txt\ndoor\n"
    assert scene.ask("commit", "w").status == 0
    assert (scene.base / "a.txt").read_text() == "Hel"
    owner = scene.base.stat().st_uid
    assert {path.stat().st_uid for path in scene.base.iterdir()} == {owner}


# spec WS4
@pytest.mark.parametrize("mode", [":direct", ":read-only"])
def test_fd_3_may_what_the_mode_says(scene: Scene, mode: str) -> None:
    script = """
print(door.read_all(door.open('a.txt')))
try: fd = door.open('b.txt', 'w')
except AccessDeniedError: print('denied')
else: door.write(fd, b'new'); print(open('b.txt').read())
"""
    done = scene.run(script, mode=mode)
    if mode == ":direct":
        assert done.out == b"b'hello\\n'\nnew\n", done.err
        owner = scene.base.stat().st_uid
        assert (scene.base / "b.txt").stat().st_uid == owner
    else:
        assert done.out == b"b'hello\\n'\ndenied\n", done.err
        assert os.listdir(scene.base) == ["a.txt"]


# spec WS5: --root says what FD 3 has.
def test_a_root_that_is_named_is_fd_3_s(scene: Scene) -> None:
    (scene.top / "root").mkdir()
    script = "print(door.listdir('.')); print(os.listdir('.'))"
    done = scene.run(script, "--root", str(scene.top / "root"))
    assert done.out == b"[]\n['a.txt']\n", done.err


# spec WS1: no grant of FD 3 leads to the base beside the workspace.
@pytest.mark.parametrize(
    ("option", "where", "is_refused"),
    [
        ("--read", "repo/a.txt", True),
        ("--write", "repo", True),
        ("--write", "link", True),
        ("--write", ".", True),
        ("--read", ".", False),
    ],
)
def test_a_grant_that_goes_round_the_workspace_is_refused(
    scene: Scene, option: str, where: str, is_refused: bool
) -> None:
    (scene.top / "link").symlink_to("repo")
    done = scene.run("print('ran')", option, str(scene.top / where))
    assert (done.out == b"") is is_refused, done.err
    if is_refused:
        assert done.status == 125
        assert done.said("leave the grant out")


def test_there_is_no_fresh_root_to_keep(scene: Scene) -> None:
    done = scene.run("print('ran')", "--keep")
    assert (done.status, done.out) == (125, b"")
    assert done.said("--keep: FD 3's root is the workspace")


# spec A3b, WS2
@pytest.mark.nobody
def test_a_staged_file_appears_at_its_close_and_nothing_else_does(
    scene: Scene,
) -> None:
    script = """
for name in ('a.txt', 'new'):
    fd = door.open(name, 'w'); door.write(fd, b'whole')
    assert sorted(os.listdir()) == before, os.listdir()
    door.close(fd); before = sorted({*before, name})
    assert open(name).read() == 'whole' and os.stat(name).st_uid == os.getuid()
print(sorted(os.listdir()))
"""
    options = scene.configured("[policy.run]\npublish = 'on-close'\n")
    done = scene.run("before = ['a.txt']\n" + script, *options)
    assert done.out == b"['a.txt', 'new']\n", done.err
    assert scene.ask("diff", "w", "--name-only").out == b"a.txt\nnew\n"


# spec A3b, WS18
@pytest.mark.nobody
def test_a_host_that_is_killed_leaves_nothing_of_what_was_not_published(
    scene: Scene,
) -> None:
    options = scene.configured("[policy.run]\npublish = 'on-close'\n")
    script = """
fd = door.open('a.txt', 'w'); door.write(fd, b'half')
open('.sandhost-0123456789abcdef', 'w').close()  # as in the instant of publication
print('ready', flush=True); input()
"""
    with started(scene, script, *options) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert scene.ask("diff", "w", "--name-only").out == b""
    # FD 3 first: a user's host has the root, and sweeps it, when the child has begun.
    script = "door.close(door.open('a.txt', 'r')); print(os.listdir())"
    done = scene.run(f"{script}; print(open('a.txt').read())")
    assert done.out == b"['a.txt']\nhello\n\n", done.err


# spec A4: links of the workspace, and what lies beside it.
def test_no_name_leads_out_of_the_workspace(scene: Scene) -> None:
    (scene.top / "secret").write_text("secret\n")
    script = f"""
top = {str(scene.top)!r}
os.symlink('..', 'up'); os.symlink(top + '/secret', 'far'); os.symlink('/', 'all')
os.symlink('../secret', 'near'); os.mkdir('d'); os.symlink('../../secret', 'd/near')
os.symlink('/proc/self/cwd', 'magic'); os.mkfifo('fifo')
tried = ('up/secret', 'far', 'all/etc/passwd', 'near', 'd/near', 'd/../../secret',
         '../secret', top + '/secret', top + '/repo/../secret', 'magic/a.txt',
         '/proc/self/root/etc/passwd', 'd/../../repo/a.txt')
for name in tried:
    for mode in ('r', 'w', 'a', 'r+'):
        try: door.open(name, mode); print('opened', name)
        except (AccessDeniedError, NotFoundError): pass
    for call in (door.listdir, door.mkdir, door.remove):
        try: call(name + '/x'); print(call, name)
        except (AccessDeniedError, NotFoundError, NotDirectoryError): pass
    try: door.rename('a.txt', name + '/x'); print('moved', name)
    except (AccessDeniedError, NotFoundError, NotDirectoryError): pass
try: door.open('fifo')
except FsProxyError: print('no fifo')
"""
    done = scene.run(script)
    assert done.out == b"no fifo\n", (done.out, done.err[-500:])
    assert (scene.top / "secret").read_text() == "secret\n"


# spec A4: 2,000 opens while the child swaps a directory and a link to one outside.
def test_a_directory_that_is_swapped_in_a_loop_lets_nothing_escape(
    scene: Scene,
) -> None:
    outside = scene.top / "outside"
    outside.mkdir(mode=0o777)
    outside.chmod(0o777)
    (outside / "f").write_text("outside\n")
    script = f"""
import threading
os.mkdir('in'); open('in/f', 'w').write('inside'); os.symlink({str(outside)!r}, 'out')
ends = False
def swap():
    while not ends:
        os.rename('in', 'kept'); os.rename('out', 'in')
        os.rename('in', 'out'); os.rename('kept', 'in')
thread = threading.Thread(target=swap); thread.start()
seen = set()
for _ in range(2000):
    try:
        fd = door.open('in/f'); seen.add(door.read_all(fd)); door.close(fd)
    except (AccessDeniedError, NotFoundError): pass
    try: door.close(door.open('in/made', 'w'))
    except (AccessDeniedError, NotFoundError): pass
ends = True; thread.join(); print(sorted(seen))
"""
    done = scene.run(script)
    assert done.out == b"[b'inside']\n", (done.out, done.err[-500:])
    assert os.listdir(outside) == ["f"]


# spec WS3: what another user owns in the base stays that user's, by the door as well.
@of_root
def test_the_door_gives_no_more_than_the_file_s_mode(scene: Scene) -> None:
    (scene.base / "theirs").write_text("theirs\n")
    (scene.base / "theirs").chmod(0o600)  # root's, in a base of another user
    (scene.base / "group").write_text("group\n")
    (scene.base / "group").chmod(0o660)
    script = """
for name in ('theirs', 'group'):
    for mode in ('r', 'r+', 'a'):
        try: door.open(name, mode); print('opened', name, mode)
        except FsProxyError as why: assert 'ermission' in str(why), why
for name in ('theirs', 'group'):
    try: open(name); print('opened', name)
    except PermissionError: pass
print('ok')
"""
    done = scene.run(script)
    assert done.out == b"ok\n", done.err


NESTED = (
    HEAD
    + """
try: open('calls', 'w').write('x')
except OSError as why: print(why.strerror)
door.close(door.open('d/door', 'w'))
try: door.close(door.open('outside', 'w')); print('written')
except AccessDeniedError: print('denied')
print(sorted(os.listdir()), os.listdir('d'), open('a.txt').read())
"""
)


# The packages of nobody's interpreter are out of a child's sight.
# spec N4, A5: nested children have the same tree, by both ways, with their rights.
@of_root
@pytest.mark.parametrize("rights", [(), ("--read", ".", "--write", "d")])
def test_nested_children_share_the_workspace(
    scene: Scene, rights: tuple[str, ...]
) -> None:
    script = f"""
import subprocess, sys
os.mkdir('d')
words = [{SANDHOST!r}, 'relay', *{rights!r}, '--', sys.executable, '-c', {NESTED!r}]
done = subprocess.run(words, pass_fds=(3,), capture_output=True, text=True)
print(done.stdout, done.stderr[-300:], sep='', end='')
print(sorted(os.listdir('.')), os.listdir('d'))
"""
    done = scene.run(script)
    if rights:
        first = ["Permission denied", "denied", "['a.txt', 'd'] ['door'] hello"]
        last = "['a.txt', 'd'] ['door']"
    else:
        names = "['a.txt', 'calls', 'd', 'outside'] ['door']"
        first, last = ["written", f"{names} hello"], names
    assert done.out.decode().splitlines() == [*first, "", last], done.err


TOOL = """#!/bin/sh
pwd; cat "$1"; echo tool > by-tool; stat -c %u by-tool
"""


# spec WS2: tools of the child work in the same tree.
@pytest.mark.nobody
def test_tools_of_the_child_work_in_the_workspace(scene: Scene) -> None:
    (scene.top / "bin").mkdir()
    (scene.top / "bin/go").write_text(TOOL)
    (scene.top / "bin/go").chmod(0o755)
    options = scene.configured(
        "[toolexec]\nlisten = ['unix']\n"
        f"[sidecar.my-go]\nkind = 'go'\npath = ['{scene.top}/bin']\n"
    )
    script = """
from vfs.client.tools import ToolClient
os.makedirs('sub/x'); open('sub/x/made', 'w').write('made\\n')
where = os.path.abspath('sub/x')
for cwd in ('/workspace/sub/x', where):
    try: done = ToolClient().run('go', 'made', cwd=cwd)
    except Exception as why: print(why); continue
    assert done.output.decode() == f'{where}\\nmade\\n{os.getuid()}\\n', done.output
    assert open('sub/x/by-tool').read() == 'tool\\n'
    assert door.read_all(door.open('sub/x/by-tool')) == b'tool\\n'
os.symlink('/etc', 'out')
for cwd in ('/etc', '/workspace/..', '/workspace/out'):
    try: ToolClient().run('go', 'passwd', cwd=cwd); print('ran', cwd)
    except Exception: pass
print('ok')
"""
    done = scene.run(script, *options)
    assert done.out == b"ok\n", done.err
    assert os.listdir(scene.base) == ["a.txt"]


# spec WS2: with FD 3 elsewhere, and with two workspaces, tools see what the child sees.
def test_tools_see_all_workspaces_of_the_child(scene: Scene) -> None:
    (scene.top / "bin").mkdir()
    (scene.top / "bin/go").write_text('#!/bin/sh\nls "$@"; echo t > "$1/t"\n')
    (scene.top / "bin/go").chmod(0o755)
    for name in ("root", "second"):
        (scene.top / name).mkdir()
    options = scene.configured(
        "[toolexec]\nlisten = ['unix']\n"
        f"[sidecar.my-go]\nkind = 'go'\npath = ['{scene.top}/bin']\n"
    )
    script = """
import sys
from vfs.client.tools import ToolClient
open('mine', 'w').close(); open(sys.argv[1] + '/other', 'w').close()
print(ToolClient().run('go', os.getcwd(), sys.argv[1], cwd='/workspace').output)
print(sorted(os.listdir()), os.listdir(sys.argv[1]))
"""
    second = str(scene.top / "second")
    state = str(scene.top / "state")
    words = ["run", "--state-dir", state, "--root", str(scene.top / "root"), *options]
    words += ["--workspace", str(scene.base), "--workspace", second, "--"]
    done = sandhost(*words, sys.executable, "-c", HEAD + script, second)
    listed = f"{scene.base}:\na.txt\nmine\n\n{second}:\nother\n".encode()
    assert done.out.decode() == f"{listed!r}\n['a.txt', 'mine', 't'] ['other']\n"
    assert os.listdir(scene.base) == ["a.txt"]
    assert os.listdir(second) == []


def test_the_environment_names_the_workspace_and_caps_the_root(scene: Scene) -> None:
    script = "print(os.environ['SANDHOST_WORKSPACE'], door.caps()['rights'])"
    done = scene.run(script)
    assert done.out == b"w {'top_level': False, 'grants': []}\n", done.err


# spec WS2, L3, L4: what the model is asked about, and what it answers, are files there.
def test_the_model_reads_and_writes_files_of_the_workspace(scene: Scene) -> None:
    with provider_process(scene.top / "served") as base_url:
        text = (
            f'[llm]\nbase_url = "{base_url}"\napi_key_file = "{key_file(scene.top)}"\n'
        )
        script = """
open('notes', 'w').write('one two three')
door.llm_chat_json('count', input_files=['notes'], output_files=['answer'])
print(os.stat('answer').st_uid == os.getuid(), bool(open('answer').read()))
try: door.llm_chat_json('count', input_files=['../a'])
except FsProxyError: print('refused')
"""
        done = scene.run(script, *scene.configured(text))
    assert done.out == b"True True\nrefused\n", done.err
    assert os.listdir(scene.base) == ["a.txt"]


def test_what_is_told_of_a_child_is_what_it_holds(scene: Scene) -> None:
    """A journal of the end: nothing of the workspace is left open or locked."""
    assert scene.run("open('x', 'w').close()").status == 0
    (row,) = json.loads(scene.ask("list", "--json").out)
    assert row["state"] == "idle"
