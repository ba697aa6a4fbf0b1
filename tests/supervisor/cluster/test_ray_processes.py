"""Ports and processes of Ray, read without asking Ray."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from supervisor.cluster import ray_processes
from supervisor.cluster.ray_processes import RayError, locked, worker_ports


@contextmanager
def raylet(*words: str) -> Iterator[None]:
    """Run a program whose command line is like a raylet's."""
    command = ("sh", "-c", "echo; read line", "raylet", *words)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as one:
        assert one.stdout is not None
        one.stdout.readline()
        yield
        assert one.stdin is not None
        one.stdin.write(b"over\n")


RANGE = ("--min_worker_port=21800", "--max_worker_port=21840")
NONE = ("--min_worker_port=0", "--max_worker_port=0")


# spec FL9
@pytest.mark.parametrize(
    ("words", "ports"),
    [
        (RANGE, ((21_800, 21_840),)),
        ((*RANGE, "--worker_port_list=7,9"), ((7, 7), (9, 9))),
        ((*NONE, "--worker_port_list="), None),
    ],
)
def test_the_ports_of_a_user_s_raylet_are_read(
    words: tuple[str, ...], ports: tuple[tuple[int, int], ...] | None
) -> None:
    if ports is None:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii")
        first, last = map(int, text.split())
        ports = ((first, last),)
    with raylet("--node_id=ab12", *words):
        assert worker_ports("ab12") == ports
        with pytest.raises(RayError, match="its ports are not known"):
            worker_ports("ab1")


# spec FL9
def test_the_ports_of_no_raylet_are_not_guessed() -> None:
    with pytest.raises(RayError, match="its ports are not known"):
        worker_ports("cd34")


@contextmanager
def other_command(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that holds a node's lock until it reads a line."""
    script = 'exec 9>"$0"; flock 9; echo; read line'
    with subprocess.Popen(
        ("sh", "-c", script, str(directory / ray_processes.LOCK)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as one:
        assert one.stdout is not None
        one.stdout.readline()
        yield one


# spec FL8: `leave` on a user's own Ray returns before its last process has ended.
def test_a_command_waits_for_the_end_of_another_one(tmp_path: Path) -> None:
    def enter() -> bool:
        with locked(str(tmp_path)):
            return True

    with other_command(tmp_path) as one, ThreadPoolExecutor() as threads:
        entered = threads.submit(enter)
        assert one.stdin is not None
        one.stdin.write(b"over\n")
        one.stdin.close()
        assert entered.result()


# spec FL8
def test_a_command_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_processes, "LOCK_S", 0.0)
    with other_command(tmp_path) as one:
        with pytest.raises(RayError, match="another command does so"):
            with locked(str(tmp_path)):
                pass
        one.communicate(b"over\n")
