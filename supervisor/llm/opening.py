"""Opening a host's model: keys, providers, spending, the endpoint.

    async with open_llm(host, section, state_dir):
        ...

Rule: keys go from here into their providers, and are kept nowhere else (I10).
"""

from __future__ import annotations

import errno
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import trio

from hostlib import keys
from hostlib.threads import in_thread
from supervisor.llm import provider
from supervisor.llm.accounts import Accounts
from supervisor.llm.endpoint import close_left, open_endpoint
from supervisor.llm.ledger import LedgerError, Spending
from supervisor.llm.models import Models
from supervisor.llm.quota import Node
from supervisor.llm.service import LlmService, read_state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from supervisor.llm.provider import Provider
    from supervisor.llm.section import LlmSection
    from supervisor.parts import Parts


def _open_providers(
    section: LlmSection,
) -> tuple[dict[str | None, Provider], dict[str, keys.FileIdentity]]:
    """Return every provider, with its key, and the key files."""
    files: dict[str, keys.FileIdentity] = {}

    def key_of(path: str | None) -> str | None:
        if path is None:
            return None
        key, files[path] = keys.read_key(path)
        return key

    own = keys.take_from_environment()  # removed there even if a file is used
    key = key_of(section.api_key_file) or own
    base_url = section.base_url or provider.DEFAULT_BASE_URL
    turns = trio.Lock()
    found: dict[str | None, Provider] = {None: provider.Provider(base_url, key, turns)}
    for name, model in section.models.items():
        if model.base_url is not None:
            found[name] = provider.Provider(
                model.base_url, key_of(model.api_key_file), turns
            )
    return found, files


@asynccontextmanager
async def open_llm(
    host: Parts,
    section: LlmSection,
    state_dir: str | None = None,
    left: object = None,
) -> AsyncIterator[LlmService]:
    """Offer the model to a host's children, for the length of the block.

    Args:
        host: the host.
        section: the configuration.
        state_dir: directory for spending; None to keep none.
        left: the state from the program before; None if there is none.

    Raises:
        HandoverError: the state comes from another version of the program.
        OSError: a key, a proxy or the state directory cannot be used; ``strerror`` says
            why.
    """
    await in_thread(provider.load)
    quota = section.quota
    limit = None if quota.max_tokens is None else float(quota.max_tokens)
    root = Node(None, limit, section.max_calls)
    async with AsyncExitStack() as stack:
        try:
            providers, key_files = _open_providers(section)
            for one in providers.values():
                stack.push_async_callback(one.aclose)
            spending = Spending(
                root,
                quota.window,
                state_dir,
                lambda text: host.log.write("WARNING", text),
            )
        except (keys.KeyFileError, LedgerError) as why:
            raise OSError(errno.EINVAL, str(why)) from None
        stack.push_async_callback(spending.close)
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(spending.write_again)
        stack.callback(nursery.cancel_scope.cancel)
        models = Models(host, section, providers, Accounts(root, spending))
        service = LlmService(models)
        host.holders.add(service.descriptors)
        stack.callback(host.holders.discard, service.descriptors)
        host.services.llm = service
        stack.callback(setattr, host.services, "llm", None)
        host.hide_key_files(key_files)
        before = None if left is None else read_state(left).endpoint
        if before is not None and not section.endpoint:
            close_left(before)
        if section.endpoint:
            service.endpoint = await stack.enter_async_context(
                open_endpoint(models, before)
            )
        yield service
