"""LLM fds while the host is replaced.

The same ids, the same bytes, the same names.
"""

import ast
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import read_until
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.replacing import assert_clean, replace_daemon

pytestmark = pytest.mark.slow

DOES = """
import sys
from vfs.client import Client

client = Client()
names = {"client": client, "call": client.fd_call, "put": client.fd_put}
with open("told") as told, open("said", "w") as said:
    for line in told:
        try:
            value = eval(line, names)
        except OSError as why:
            value = str(why)
        print(repr(value), file=said, flush=True)
"""

CONFIG = """
[tools]
enabled = {tools}
[file_descriptor]
enabled = true
max_memory = "{max_memory}"
[policy.p]
sandbox = "none"
[child.a]
command = {command}
policy = "p"
cwd = "{where}"
"""

TOOLS = [
    *("read_fd", "search_fd", "rename_fd", "mark_fd_section", "get_fd_section"),
    *("create_temp_file", "read_temp_file", "write_temp_file", "list_fd_sections"),
    *("checkpoint_process", "restore_process", "list_checkpoints"),
]


class Scene:
    """A daemon with one child, which does what it is told."""

    def __init__(self, running: Daemon, where: Path) -> None:
        self.running = running
        self.where = where
        self._tell = os.open(where / "told", os.O_RDWR)
        self._hear = os.open(where / "said", os.O_RDWR)

    def do(self, expression: str) -> Any:
        """Have the child evaluate an expression, and return the value."""
        os.write(self._tell, expression.encode() + b"\n")
        data = b""
        while not data.endswith(b"\n"):
            data += read_until(self._hear, b"\n")
        return ast.literal_eval(data.decode())

    def close(self) -> None:
        """Give the test's descriptors back."""
        os.close(self._tell)
        os.close(self._hear)


@contextmanager
def opened(max_memory: str = "256M") -> Iterator[Scene]:
    """Start a daemon with LLM fds."""
    with tempfile.TemporaryDirectory(prefix="sf-", dir="/tmp") as name:
        where = Path(name)
        for fifo in ("told", "said"):
            os.mkfifo(where / fifo)
        command = [sys.executable, "-I", "-c", DOES]
        config = CONFIG.format(
            tools=json.dumps(TOOLS),
            max_memory=max_memory,
            command=json.dumps(command),
            where=where,
        )
        with daemon(where, config) as running:
            scene = Scene(running, where)
            try:
                yield scene
                assert_clean(running)
                assert running.end() == 0
                assert "ERROR" not in running.said()
            finally:
                scene.close()


LOOKS = (
    "call('list_fds')",
    "[call('read_fd', fd=f'fd:{n}', page=p) for n in (1, 2, 3) for p in (1, 2)]",
    "call('search_fd', fd='fd:1', query='77777')",
    "call('read_fd', name='the log', start_line=5, end_line=7)",
    "call('get_fd_section', fd='fd:1', ref_id='here')",
    "call('read_temp_file', temp_file_id='temp:1')",
    "call('list_checkpoints')",
)


# In memory, and off-loaded to files, which is what a small max_memory makes of them.
@pytest.mark.parametrize("max_memory", ["256M", "64K"])
def test_what_clients_hold_is_what_they_held(max_memory: str) -> None:
    with opened(max_memory) as scene:
        wraps = (
            "put(''.join(f'{n}\\n' for n in range(100_000)).encode())",
            "put(bytes(range(256)) * 500)",  # no text: served as base64
            "put('\\u00e9\\u4e2d\\U0001f600\\n'.encode() * 9_000)",
        )
        for put in wraps:
            answer = scene.do(f"call('wrap_output', token={put}, source='tool:t')")
            assert answer.startswith("<fd_result "), answer
        assert "error" not in scene.do("call('rename_fd', fd='fd:1', name='the log')")
        assert "error" not in scene.do(
            "call('mark_fd_section', fd='fd:1', ref_id='here', start_line=3, end_line=4)"
        )
        made = scene.do("call('create_temp_file', content='temporary')")
        assert "temp:1" in made, made
        checkpoint = scene.do("call('checkpoint_process', label='before')")
        (ident,) = [w for w in checkpoint.split('"') if w.startswith("ckpt:")]
        begun = scene.do("put(b'begun ' * 50_000)")
        # A connection that was attached has what its parent had, and goes its own way.
        scene.do("globals().update(other=client.attach())")
        own = "other.fd_call('wrap_output', token=other.fd_put(b'own ' * 9_000))"
        assert 'fd="fd:4"' in scene.do(own)
        before = [scene.do(look) for look in LOOKS]
        assert not any("<fd_error" in str(look) for look in before), before
        for _ in range(2):
            replace_daemon(scene.running)
            assert [scene.do(look) for look in LOOKS] == before
            assert_clean(scene.running)
        assert "own own" in scene.do("other.fd_call('read_fd', fd='fd:4', page=1)")
        assert "not_found" in scene.do("call('read_fd', fd='fd:4', page=1)")
        # Unfinished contents are completed; numbers, versions and checkpoints go on.
        scene.do(f"put(b'and completed', {begun!r})")
        answer = scene.do(f"call('wrap_output', token={begun!r}, source='tool:b')")
        assert 'fd="fd:4"' in answer
        look = "call('read_fd', fd='fd:4', start_line=1, end_line=1)[-60:]"
        assert "and completed" in scene.do(look)
        written = scene.do(
            "call('write_temp_file', temp_file_id='temp:1', content='x', version=1)"
        )
        assert 'version="2"' in written, written
        assert "temp:2" in scene.do("call('create_temp_file', content='second')")
        assert "<restore " in scene.do(
            f"call('restore_process', checkpoint_id={ident!r})"
        )
        assert scene.do(LOOKS[1]) == before[1]


# Freed contents are freed, under the next program too: its accounts are the same.
def test_contents_end_with_their_clients() -> None:
    with opened("64K") as scene:
        for n in range(3):
            scene.do(f"call('wrap_output', token=put(b'{n}' * 300_000))")
        replace_daemon(scene.running)

        def files() -> int:
            return len(os.listdir(scene.where / "state/checkpoints/contents"))

        assert files() == 3
        scene.running.client.kill("a", "KILL")
        scene.running.wait(lambda: files() == 0, "its end")


# A content longer than is kept in memory when it comes in pieces.
def test_a_long_content_stays_in_its_file() -> None:
    with opened() as scene:
        scene.do("globals().update(t=put(b'0123456789abcde\\n' * 600_000))")
        scene.do("put(b'0123456789ABCDE\\n' * 600_000, t)")
        assert "<fd_result " in scene.do("call('wrap_output', token=t)")
        look = "call('read_fd', fd='fd:1', start_line=600_000, end_line=600_001)"
        before = scene.do(look)
        assert "0123456789abcde\n0123456789ABCDE" in before
        for _ in range(2):
            replace_daemon(scene.running)
            assert scene.do(look) == before
            assert_clean(scene.running)


# An unfinished content is in memory or in a file.
@pytest.mark.parametrize(
    ("max_memory", "lines"), [("256M", 20_000), ("64K", 20_000), ("256M", 2_000_000)]
)
def test_what_is_begun_is_completed_to_the_byte(max_memory: str, lines: int) -> None:
    with opened(max_memory) as scene:
        scene.do(
            "globals().update(text=lambda a, b: b''.join(b'%015d\\n' % n for n in range(a, b)))"
        )
        tokens = [
            scene.do(f"globals().update(t{n}=put(text({n}, {lines})))") for n in (0, 1)
        ]
        assert tokens == [None, None]
        for more in range(2):
            replace_daemon(scene.running)
            assert_clean(scene.running)
            scene.do(f"put(text({lines + more}, {lines + more + 1}), t0)")
        # One is used, the other is dropped by the child's end: neither leaves a file.
        answer = scene.do("call('wrap_output', token=t0)")
        assert f'total_lines="{lines + 2}"' in answer, answer
        scene.do(f"globals().update(whole=text(0, {lines + 2}))")
        same = scene.do("call('wrap_output', token=put(whole))")
        assert same == answer.replace('"fd:1"', '"fd:2"')
        for first in (1, lines // 2, lines - 1):
            look = (
                f"call('read_fd', fd='fd:1', start_line={first}, end_line={first + 3})"
            )
            expected = "".join(f"{n:015}\n" for n in range(first - 1, first + 3))
            assert f"\n{expected}\n</fd_content>" in scene.do(look)
        assert "invalid_parameter" in scene.do("call('wrap_output', token=t0)")


# A process with some descriptors only sees no checkpoint of others by the next program.
def test_who_sees_which_checkpoint_is_kept() -> None:
    with opened() as scene:
        scene.do("call('wrap_output', token=put(b'secret ' * 9_000))")
        (first,) = idents(scene.do("call('checkpoint_process', label='all')"))
        scene.do("globals().update(other=client.attach())")
        scene.do("other.fd_call('keep_fds', fds=[])")
        scene.do("globals().update(own=client.attach())")
        (second,) = idents(scene.do("own.fd_call('checkpoint_process', label='own')"))
        for _ in range(2):
            replace_daemon(scene.running)
            assert idents(scene.do("call('list_checkpoints')")) == [first, second]
            assert idents(scene.do("own.fd_call('list_checkpoints')")) == [
                first,
                second,
            ]
            assert idents(scene.do("other.fd_call('list_checkpoints')")) == []
            look = f"other.fd_call('restore_process', checkpoint_id={first!r})"
            assert 'type="not_found"' in scene.do(look)
        # Its earlier checkpoints are its own; that of others, it has given up.
        scene.do("own.fd_call('keep_fds', fds=[])")
        assert idents(scene.do("own.fd_call('list_checkpoints')")) == [second]
        (third,) = idents(scene.do("other.fd_call('checkpoint_process')"))
        replace_daemon(scene.running)
        assert idents(scene.do("own.fd_call('list_checkpoints')")) == [second]
        assert idents(scene.do("other.fd_call('list_checkpoints')")) == [third]


def idents(answer: str) -> list[str]:
    """Return the ids of checkpoints in an answer."""
    return [word for word in answer.split('"') if word.startswith("ckpt:")]
