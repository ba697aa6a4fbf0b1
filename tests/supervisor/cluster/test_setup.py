"""Places at which Ray cannot be, told before any of it is started."""

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("ray")

from supervisor.cluster import ray_processes
from supervisor.cluster.names import LOOPBACK
from supervisor.cluster.orders import DirectoryOrder, NodeOrder, SetupOrder
from supervisor.cluster.ray_adapter import AdapterError
from supervisor.cluster.setup import set_up

FOREIGN = "192.0.2.1"  # of RFC 5737: no machine has it


def order(
    where: Path, port: int, bind: str = LOOPBACK, address: str | None = None
) -> SetupOrder:
    """Return an order to begin a fleet, or to join one at an address."""
    node = NodeOrder("n", (), f"{where}/control", str(where), is_head=address is None)
    head = DirectoryOrder(f"{where}/store") if address is None else None
    return SetupOrder(node, f"{where}/token", bind, address, port, head=head)


# spec FL1
def test_a_fleet_is_not_begun_at_a_port_that_is_in_use(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(AdapterError) as why:
            set_up(order(tmp_path, port))
    assert str(why.value) == (
        f"cannot start Ray at {LOOPBACK}:{port}: Address already in use; choose another"
        " port"
    )
    assert os.listdir(tmp_path) == []


# spec FL1
@pytest.mark.parametrize("address", [None, f"{LOOPBACK}:9"], ids=["up", "join"])
def test_ray_is_not_started_at_an_address_of_another_machine(
    tmp_path: Path, address: str | None
) -> None:
    with pytest.raises(AdapterError, match=f"at {FOREIGN}.*; choose another by --bind"):
        set_up(order(tmp_path, 9, FOREIGN, address))
    assert os.listdir(tmp_path) == []


# spec FL1
def test_a_head_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))  # and does not listen
        address = f"{LOOPBACK}:{other.getsockname()[1]}"
        with pytest.raises(AdapterError, match=f"{address}: Connection refused; give"):
            set_up(order(tmp_path, 9, address=address))
    with pytest.raises(AdapterError, match=r"cannot reach no\.invalid:9: .*; give the"):
        set_up(order(tmp_path, 9, address="no.invalid:9"))
    with pytest.raises(AdapterError, match=r"cannot reach a\.\.b:9: .*; give the"):
        set_up(order(tmp_path, 9, address="a..b:9"))
    assert os.listdir(tmp_path) == []


# spec FL8: the kernel tells a start of its command's end only once it has asked for that.
@pytest.mark.slow
def test_a_start_whose_command_has_ended_begins_nothing(tmp_path: Path) -> None:
    words = (sys.executable, "-m", "supervisor.cluster.setup", "1")
    asked = msgspec.json.encode(order(tmp_path, 9, FOREIGN))
    done = subprocess.run(words, input=asked, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    words = (*words[:-1], str(os.getpid()))
    done = subprocess.run(words, input=asked, capture_output=True, check=False)
    assert b"choose another by --bind" in done.stdout


# spec FL8: a start may outlive its command, while Ray does not answer it.
@pytest.mark.slow
def test_a_start_keeps_the_lock_of_its_node(tmp_path: Path) -> None:
    script = "import fcntl, sys; fcntl.flock(int(sys.argv[1]), fcntl.LOCK_EX)"
    with ray_processes.locked(str(tmp_path)) as lock:
        words = (sys.executable, "-c", script, str(lock))
        assert ray_processes.run(words, None, b"", (lock,)) == (b"", "")


# spec FL8: Ray waits 40 s for a head that is stopped, and lets no signal through.
@pytest.mark.slow
def test_a_start_that_ray_holds_up_ends_with_its_command(tmp_path: Path) -> None:
    with socket.socket() as head:
        head.bind((LOOPBACK, 0))
        head.listen()
        address = f"{LOOPBACK}:{head.getsockname()[1]}"
        asked = msgspec.json.encode(order(tmp_path, 9, address=address))
        (tmp_path / "order").write_bytes(asked)
        script = f'"$@" $$ < {tmp_path}/order & echo $!; wait'
        words = ("sh", "-c", script, "sh", sys.executable, "-m")
        with subprocess.Popen(
            (*words, "supervisor.cluster.setup"), stdout=subprocess.PIPE, text=True
        ) as command:
            assert command.stdout is not None
            start = os.pidfd_open(int(command.stdout.readline()))
            for _ in range(2):  # the first one is no Ray
                head.accept()[0].close()
            command.kill()
            ended, _, _ = select.select([start], [], [], 20.0)
            os.close(start)
    assert ended
