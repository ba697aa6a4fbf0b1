"""A nested client whose parent ends: its requests are done, without replies."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from supervisor.fsproxy.replies import PROCESS_EXIT
from tests.helpers.sessions import Line, chat_request
from tests.helpers.stage import Stage, eventually, open_model_stage, open_stage

MIB = 1024 * 1024

HANGS = chat_request(b"!hang")


@pytest.fixture
async def hosted(tmp_path: Path) -> AsyncIterator[Stage]:
    """Return a host with a model."""
    async with open_stage(tmp_path, model={}) as stage:
        yield stage


# attack 47, spec T3, S2: the answer to a CLOSE does not stand where the model's belongs.
@pytest.mark.slow
@pytest.mark.parametrize("publish", ["direct", "on-close"])
async def test_nothing_is_sent_once_a_parent_is_closed(
    hosted: Stage, publish: str
) -> None:
    child = await hosted.puppet(publish=publish)
    second = await child.do("attached()")
    third = await child.do(f"attached({second})")
    number = await child.do(f"opened(b'out', b'w+', fd={third})")
    asked = HANGS + b"WRITE %d 5\nhello" % number
    asked += b"".join(
        word % number
        for word in (b"READ %d 5\n", b"SEEK %d 0\n", b"SYNC %d\n", b"CLOSE %d\n")
    )
    asked += b"PING\n"
    await child.do(f"send({asked!r}, {third})")
    await hosted.provider.wait_for(1)
    await child.do(f"os.close({second})")
    assert await child.do(f"take(1000, {third})") == b""
    # A complete request is still done.
    assert (hosted.root / "out").read_bytes() == b"hello"
    assert await child.ask(b"PING\n") == b"OK"
    await child.leave()


def beneath(parent: Line, nested: Line) -> None:
    """Let a client end with another one, as what it has attached does."""
    parent.session.nested.append(nested.session)
    nested.session.parent = parent.session


REQUESTS = {
    "read": b"READ %d 10\n",
    "large read": b"READ %%d %d\n" % MIB,
    "larger read": b"READ %%d %d\n" % (8 * MIB),
    "sync": b"SYNC %d\n",
    "close": b"CLOSE %d\n",
    "torn write": b"WRITE %d 100\nnot all of it",
    "error": b"READ %d x\nnonsense\n",
    "attach": b"ATTACH\nSYNC %d\n",
    "chat": HANGS + b"SYNC %d\n",
}


# attack 47, spec T3: whatever it was that came behind the model's answer.
@pytest.mark.parametrize("how", ["parent closed", "parent exited", "exited"])
@pytest.mark.parametrize("asked", REQUESTS.values(), ids=REQUESTS)
async def test_no_answer_comes_for_another(
    tmp_path: Path, no_leaks: None, asked: bytes, how: str
) -> None:
    del no_leaks
    async with open_model_stage(tmp_path) as stage:
        (stage.root / "big").write_bytes(b"x" * 8 * MIB)
        parent = stage.connect()
        nested = stage.nested(parent)
        beneath(parent, nested)
        number = await nested.open(b"big", b"r+")
        await nested.send(HANGS + asked % number + b"PING\n")
        await stage.provider.wait_for(1)
        with trio.fail_after(30):
            if how == "parent closed":
                parent.close()
                await parent.gone()
            else:
                line = nested if how == "exited" else parent
                await line.session.finish(PROCESS_EXIT)
            assert await nested.rest() == b""
        assert (stage.root / "big").stat().st_size == 8 * MIB


# attack 47: an answer that is on its way when the parent goes ends there.
async def test_an_answer_that_had_begun_is_not_gone_on_with(tmp_path: Path) -> None:
    async with open_model_stage(tmp_path) as stage:
        (stage.root / "big").write_bytes(b"x" * 8 * MIB)
        parent = stage.connect()
        nested = stage.nested(parent)
        beneath(parent, nested)
        number = await nested.open(b"big")
        await nested.send(b"READ %d %d\nSYNC %d\n" % (number, 8 * MIB, number))
        await eventually(lambda: nested.session.outbound.transfer is not None)
        parent.close()
        with trio.fail_after(30):
            await parent.gone()
            said = await nested.rest()
        head = b"OK %d\n" % (8 * MIB)
        assert said.startswith(head)
        assert set(said[len(head) :]) <= {ord("x")}
