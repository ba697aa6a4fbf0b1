"""A host with children, a model and a stand-in for its provider, in one test.

    async with open_model_host(tmp_path, endpoint=True) as scene:
        child = await scene.stage.puppet()

Real processes and real HTTP. `doors` and `innerscene` are made of it; `llmscene` has the
model without processes.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from demo.provider import Provider, serving
from supervisor.llm.endpoint import Endpoint
from supervisor.llm.opening import open_llm
from supervisor.llm.service import LlmService
from tests.helpers.canary import KEY
from tests.helpers.hosts import Stage, eventually, opened
from tests.helpers.llmscene import key_file, section


@dataclass
class ModelHost:
    """A host with a model.

    Attributes:
        stage: the host.
        provider: the stand-in.
        service: the model's.
    """

    stage: Stage
    provider: Provider
    service: LlmService

    @property
    def endpoint(self) -> Endpoint:
        """Its endpoint, if it has one."""
        assert self.service.endpoint is not None
        return self.service.endpoint


@asynccontextmanager
async def open_model_host(
    where: Path, *, log_level: str = "ERROR", **values: object
) -> AsyncIterator[ModelHost]:
    """Open a host with a model.

    Its children end with the block, and all is given back.

    Args:
        where: for its files.
        log_level: of the host.
        values: of `[llm]`; the stand-in and its key are there.
    """
    async with (
        serving(KEY) as provider,
        opened(where, log_level=log_level) as stage,
    ):
        known = {"base_url": provider.url, "api_key_file": key_file(where)}
        async with open_llm(stage.host, section(**{**known, **values})) as service:
            yield ModelHost(stage, provider, service)
            await stage.host.stop(grace_s=0.0)
            assert not service.models.accounts.root.tokens.reserved
        # The stand-in's ends are descriptors of this process too.
        await eventually(lambda: not provider.connections)
