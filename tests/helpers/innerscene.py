r"""A host whose endpoint is in a child's net namespace, and such a child.

    async def test_x(scene: Scene) -> None:
        puppet = await scene.puppet()
        assert await puppet.do("get()") == 200

The fixture `scene`, with children in all that the machine gives, who learn some words
of HTTP.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.sandbox.plan import PROFILES
from tests.helpers.hosts import Puppet
from tests.helpers.modelhost import ModelHost, open_model_host

# A puppet learns: HTTP by the address that it was told, and what listens beside it.
WORDS = """
import socket
URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:0/v1")
PORT = int(URL.split(":")[2].split("/")[0])
TOKEN = os.environ.get("OPENAI_API_KEY", "")
held = []

def connect(port=PORT, path=None):
    sock = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
    sock.connect(path or ("127.0.0.1", port))
    sock.settimeout(60)
    return sock

def hold(count, path=None):
    held.extend(connect(path=path) for _ in range(count))

def get(token=None, sock=None):
    sock = sock or connect()
    bearer = TOKEN if token is None else token
    sock.sendall(f"GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\n"
                 f"Authorization: Bearer {bearer}\\r\\n\\r\\n".encode())
    return int(sock.recv(65536).split()[1])

def fault(call):
    try:
        call()
    except OSError as why:
        return why.errno

def listening():
    rows = [line.split() for line in open("/proc/net/tcp")][1:]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"]
"""


class Scene(ModelHost):
    """A host with an endpoint, whose children run in all that the machine gives."""

    async def puppet(self, **changes: Any) -> Puppet:
        """Start a child that knows the words above."""
        puppet = await self.stage.puppet(**changes)
        await puppet.do(f"exec({WORDS!r}, globals())")
        return puppet

    def listeners(self) -> int:
        """How many listeners it has beside that of all."""
        return self.endpoint.statistics().listeners - 1


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """Return a host with an endpoint."""
    tmp_path.chmod(0o755)  # noqa: ASYNC240 - of the test's own
    async with open_model_host(tmp_path, log_level="WARNING", endpoint=True) as host:
        host.stage.sandbox = PROFILES["auto"]
        yield Scene(host.stage, host.provider, host.service)


def made(puppet: Puppet) -> str | None:
    """The child's report about its listener."""
    return dict(puppet.child.walls.applied).get("listener")


def descriptors_of(puppet: Puppet) -> list[int]:
    """The host's descriptors of the way by which the listener came."""
    found = puppet.child.descriptors()
    return [fd for fd, word in found if word == "inner listener"]
