"""Ports and processes of Ray, read without asking Ray."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from supervisor.cluster.ray_processes import RayError, worker_ports


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
