"""Files are closed where no worker thread can be had: nothing is left open (I1)."""

import errno

import pytest
import trio

from tests.helpers.leaks import open_here
from tests.vfs.worlds import World, world
from vfs.clients import Client
from vfs.ledger import Ledger
from vfs.mounts import Mount

__all__ = ["world"]


@pytest.fixture
def client(world: World, no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Return a client of a host whose user has as many threads as it may."""
    del no_leaks

    async def none(*_: object, **__: object) -> None:
        await trio.lowlevel.checkpoint()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(trio.to_thread, "run_sync", none)
    policy = world.policy()
    policy.places[0].publish = "on-close"
    return world.fs.connect(policy, Ledger(size_bytes=1000, files=10), "test")


# I1, spec C1: unpublished content is dropped, the old one stands.
@pytest.mark.parametrize("end", ["close", "abandon", "distant"])
async def test_without_a_thread_nothing_stays_open(
    world: World, client: Client, end: str
) -> None:
    fs = world.fs
    old = (world.where / "root" / "file").read_bytes()
    before = open_here(str(world.where))
    file = fs.open(client, b"file", b"w", False)
    fs.write(file, b"new")
    if end == "distant":
        file.handle.mount = Mount("nfs")
        assert await fs.end_distant(client, "test") == [file.fileno]
    else:
        call = fs.close_waiting if end == "close" else fs.abandon_waiting
        with pytest.raises(BlockingIOError) as raised:
            await call(file)
        assert raised.value.errno == errno.EAGAIN
    assert open_here(str(world.where)) == before
    assert not list(fs.descriptors())
    assert not client.files
    assert (world.where / "root" / "file").read_bytes() == old
    fs.disconnect(client, "test")
    assert not any(account.used for account in client.ledger.accounts)
    assert not client.ledger.files.reserved
