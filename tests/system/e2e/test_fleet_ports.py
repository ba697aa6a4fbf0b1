"""Children of a fleet and Ray's ports, which no rule of a policy opens to them."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from supervisor.fleet.messages import RayPlace
from tests.helpers.addresses import own_address
from tests.helpers.command import sandhost
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.fleetdoors import Doors, fleet_of
from tests.helpers.stage import PYTHON, eventually

pytestmark = pytest.mark.slow

CONFIG = """
[fleet]
[policy.net]
network = {rules}
"""

CONNECT = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), 20) as line:
        print(line.recv(100).decode(), end="")
except OSError as why:
    print(why.strerror)
"""

CUT = "Connection reset by peer"
REACHED = "hello"


@contextmanager
def server(address: str) -> Iterator[int]:
    """Serve a line at a port of this machine."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                one, _ = sock.accept()
                with one:
                    one.sendall(b"hello\n")

    with socket.create_server((address, 0)) as sock:
        threading.Thread(target=serve, daemon=True).start()
        yield int(sock.getsockname()[1])
        sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def node(where: Path, address: str, *ports: int) -> Iterator[Daemon]:
    """Start a daemon with a policy whose rules name ports of this machine."""
    rules = json.dumps([f"{address}:{port}" for port in ports])
    where.mkdir()
    with daemon(where, CONFIG.format(rules=rules), grace="1s") as one:
        yield one


async def reach(scene: Doors, name: str, address: str, port: int) -> str:
    """Have a child of the fleet connect to a port; return what it says."""
    words = ("fleet", "run", "--control", scene.control(name), "--node", name)
    child = ("--policy", "net", "--", *PYTHON, "-c", CONNECT, address, str(port))
    done = await scene.call(sandhost, *words, *child)
    assert done.status == 0, done.err
    return done.out.decode().strip()


# spec FL9
async def test_no_rule_opens_rays_ports_to_children_of_a_fleet(tmp_path: Path) -> None:
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but loopback")
    with (
        server(address) as ray,
        server(address) as other,
        node(tmp_path / "a", address, ray, other) as one,
        node(tmp_path / "b", address, ray) as two,
    ):
        async with fleet_of(tmp_path, a=one) as scene:
            assert await reach(scene, "a", address, ray) == REACHED
            scene.daemons["b"] = two
            scene.ray["b"] = RayPlace((address,), ((ray, ray),))
            await scene.begin("b")
            assert await reach(scene, "b", address, ray) == CUT
            # The next beat tells the nodes that were there before.
            while await reach(scene, "a", address, ray) == REACHED:
                pass
            assert await reach(scene, "a", address, ray) == CUT
            assert await reach(scene, "a", address, other) == REACHED
            # A child that is in no fleet has what its rules say.
            words = ("spawn", "--control", scene.control("b"), "--name", "own")
            child = ("--policy", "net", "--", *PYTHON, "-c", CONNECT)
            await scene.call(sandhost, *words, *child, address, str(ray))
            await eventually(lambda: two.log("own") == b"hello\n")
        entries = two.client.events(follow=False, lines=None)
        events = [entry.event or {} for entry in entries]
        refused = [one for one in events if one.get("event") == "network.refused"]
        assert [(one["port"], one["reason"]) for one in refused] == [
            (ray, "fleet-port")
        ]
