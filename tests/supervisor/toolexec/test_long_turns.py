"""Any request of ToolExec leaves the Trio thread short turns (attack 43)."""

import pytest

from protocol.toolexec.body import MAX_BODY_BYTES
from tests.helpers.toolscene import Scene
from tests.helpers.turns import find_longest_turn

pytestmark = pytest.mark.slow

TURN_S = 0.03
SIZE = MAX_BODY_BYTES - 100

BODIES = {
    "separators": b"&" * SIZE,
    "names": b"a=&" * (SIZE // 3),
    "arguments": b"tool=none" + b"&arg=" * (SIZE // 5 - 9),
    "escapes": b"tool=" + b"%41" * (SIZE // 3 - 9),
    "broken escapes": b"tool=" + b"%" * (SIZE - 9),
    "a name": b"a" * SIZE,
    "line feeds": b"tool=none&arg=" + b"\n" * (SIZE - 99),
    "environment": b"tool=none" + b"&env=A=b" * (SIZE // 8 - 9),
}


# attack 43, spec S5
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("name", BODIES)
async def test_a_long_form_has_short_turns(
    scene: Scene, name: str, is_chunked: bool
) -> None:
    body = BODIES[name]
    if is_chunked:
        pieces = (body[at : at + 4] for at in range(0, 400_000, 4))
        chunks = b"".join(b"4\r\n%b\r\n" % piece for piece in pieces) + b"0\r\n\r\n"
        data = scene.head(None, "Transfer-Encoding: chunked") + chunks
    else:
        data = scene.request(body)

    async def ask() -> None:
        reply = await scene.say(data)
        assert 400 <= reply.status < 500

    turn_s, task = await find_longest_turn(ask, TURN_S)
    assert turn_s < TURN_S, task
