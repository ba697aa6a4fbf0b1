"""Large heads and bodies.

Those of one child have one share of the thread between them.
"""

import pytest
import trio

from tests.helpers.stage import eventually
from tests.helpers.toolscene import Scene, Tenant


# However many large heads come to one child's socket, another's waits for one of them.
# spec toolexec 1: others are not affected.
@pytest.mark.slow
async def test_large_heads_of_one_child_delay_no_other(scene: Scene) -> None:
    other = await scene.tenant()
    answered: list[Tenant] = []

    async def ask(tenant: Tenant) -> None:
        pad = f"X-Pad: {'p' * 3000}"
        line = "GET /healthz HTTP/1.1"
        data = scene.head(None, pad, line=line, token=None)
        assert (await scene.say(data, tenant=tenant)).status == 200
        answered.append(tenant)

    def waiting(tenant: Tenant) -> int:
        listener = scene.tool.children[tenant.puppet.child.id].listener
        assert listener is not None
        (server,) = (s for s in scene.tool.servers if s.listener_fd == listener[0])
        return server.heads.held_or_waiting

    async with trio.open_nursery() as nursery:
        async with scene.tool.context.heads.hold():
            for _ in range(20):
                nursery.start_soon(ask, scene.child)
            await eventually(lambda: waiting(scene.child) == 20)
            nursery.start_soon(ask, other)
            await eventually(lambda: waiting(other) == 1)
    # One of the others was ahead; Trio shuffles those that run at once.
    assert answered.index(other) <= 3
