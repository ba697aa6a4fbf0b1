"""Where a request ends: what follows it, and a client that says nothing more."""

import pytest

from supervisor.toolexec.wire import RECEIVE_BYTES
from tests.helpers.toolscene import Scene, receive_all, send

pytestmark = pytest.mark.slow

FORM = b"tool=sh&arg=-c&arg=touch ran"


def padded(scene: Scene, size: int) -> bytes:
    """Return a request of so many bytes."""
    head = scene.head(10_000)  # as many digits as it will have
    length = size - len(head)
    assert 10_000 <= length < 100_000
    request = scene.request(FORM + b"&x=" + b"x" * (length - len(FORM) - 3))
    assert len(request) == size
    return request


# One receive ends with the body: one byte more is looked for.
# spec E6, E9
@pytest.mark.parametrize("size", [RECEIVE_BYTES - 1, RECEIVE_BYTES, RECEIVE_BYTES + 1])
async def test_a_byte_after_the_body_is_seen_wherever_that_ends(
    scene: Scene, size: int
) -> None:
    request = padded(scene, size)
    reply = await scene.say(request + b"x")
    assert (reply.status, reply.code) == (400, 86)
    assert reply.body == b"bad request: bytes after the body\n"
    assert not scene.stage.events("exec.started")
    assert not list(scene.workspace.iterdir())
    assert (await scene.say(request)).code == 0
    assert [path.name for path in scene.workspace.iterdir()] == ["ran"]


# spec E10, E25: the end of its input means that it is gone, however early it comes.
@pytest.mark.parametrize("proto", ["1", "2"])
async def test_for_who_half_closes_with_its_request_nothing_is_started(
    scene: Scene, proto: str
) -> None:
    with await scene.connect() as sock:
        await send(sock, scene.request(FORM, proto=proto))
        sock.shutdown(1)
        assert await receive_all(sock) == b""
    assert (await scene.run("tool=true")).code == 0
    (started,) = scene.stage.events("exec.started")
    assert started["tool"] == "true"
    assert not list(scene.workspace.iterdir())
