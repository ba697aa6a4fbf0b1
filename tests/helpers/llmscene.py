r"""A host with `[llm]` and a stand-in provider (real HTTP, real sockets).

    async def test_x(scene: Scene) -> None:
        line = scene.connect()
        reply = await line.chat(prompt=b"hello")
        assert reply.completion["choices"]

The hall of `tests/helpers/sessions.py` with the product's own service in it, as
`open_llm` makes it, and `demo/provider` on loopback.
"""

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from demo.provider import Provider, serving
from hostlib.journal import Journal, open_journal
from hostlib.keys import FileIdentity, SecretFiles
from hostlib.log import Log
from supervisor.config.document import Config
from supervisor.config.fds import fd_options
from supervisor.fleet.fence import Fence
from supervisor.fsproxy.ports import Services
from supervisor.llm.opening import open_llm
from supervisor.llm.section import LlmSection, check
from supervisor.llm.service import LlmService
from supervisor.llmfd.gateway import connect
from supervisor.llmfd.opening import open_fds
from supervisor.llmfd.service import FdService
from supervisor.sandbox.host_directories import Apart
from tests.helpers import canary
from tests.helpers.canary import KEY
from tests.helpers.sessions import Hall, Line, open_hall
from vfs.filesystem import Client
from vfs.policy import Policy


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to LLM_CHAT.

    Attributes:
        line: the reply line, without its LF.
        body: the bytes that followed.
    """

    line: bytes
    body: bytes = b""

    @property
    def completion(self) -> dict[str, Any]:
        """The completion."""
        assert self.line.startswith(b"OK "), self.line
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def text(self) -> str:
        """The answer of the model."""
        content: str = self.completion["choices"][0]["message"]["content"]
        return content

    @property
    def status(self) -> str:
        """The quota, as the reply tells it."""
        return self.line.split(b" ", 2)[2].decode()


class _Launcher:
    launchpad_pid = 0


class _Host:
    """As much of a host as the service looks at, around a hall."""

    def __init__(self, hall: Hall, journal: Journal, services: Services) -> None:
        self.fs = hall.fs
        self.budget = hall.budget
        self.journal = journal
        self.log = Log("ERROR", as_json=True)
        self.services = services
        self.holders: set[Any] = set()
        self.launcher = _Launcher()
        self.apart = Apart(())
        self.fence = Fence()
        self._secret_files = SecretFiles()

    def hide_key_files(self, files: Mapping[str, FileIdentity]) -> None:
        """Keep files of keys from clients, as a host does."""
        if files:
            self._secret_files.add(files)
            self.fs.is_secret = self._secret_files

    def child_of(self, client: Client) -> str:
        """Name a child by its transport."""
        return client.pipe_id.partition(":")[0]


class Scene:
    """See the top of this file.

    Attributes:
        hall: sessions and files.
        provider: the stand-in.
        service: what is tested.
        fence: of the host.
    """

    def __init__(
        self, hall: Hall, provider: Provider, service: LlmService, services: Services
    ) -> None:
        self.fence = Fence()
        self.hall = hall
        self.provider = provider
        self.service = service
        self._services = services

    def connect(self, policy: Policy | None = None, **options: Any) -> "ChatLine":
        """Connect a client."""
        line = self.hall.connect(policy, **options)
        line.session.services = self._services
        return ChatLine(line)

    def nested(self, parent: "ChatLine") -> "ChatLine":
        """Attach a client to another one, as ATTACH does."""
        return self.connect(parent.client.policy, parent=parent.client)

    @property
    def journal(self) -> list[dict[str, Any]]:
        """The events in the journal."""
        text = (self.hall.where / "journal").read_bytes()
        return [json.loads(line) for line in text.splitlines()]

    def told(self, event: str) -> list[dict[str, Any]]:
        """Return the events of one name."""
        return [row for row in self.journal if row["event"] == event]


class ChatLine:
    """A client that speaks about the model."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.client = line.client
        self.ask = line.ask
        self.send = line.send

    async def chat(
        self,
        prompt: bytes = b"",
        preset: bytes = b"",
        inputs: bytes = b"",
        outputs: bytes = b"",
        flag: bytes = b"false",
    ) -> Reply:
        """Ask the model."""
        await self.send(request(prompt, preset, inputs, outputs, flag))
        return await self.reply()

    async def reply(self) -> Reply:
        """Take the reply of an LLM_CHAT."""
        head = await self.line.line()
        if not head.startswith(b"OK "):
            return Reply(head)
        return Reply(head, await self.line.exactly(int(head.split()[1])))

    async def quota(self) -> str:
        """Ask for the quota."""
        return (await self.ask(b"LLM_QUOTA\n")).decode()

    async def config(self) -> dict[str, Any]:
        """Ask for the configuration."""
        await self.send(b"LLM_CONFIG\n")
        found: dict[str, Any] = json.loads(await self.line.body())
        return found

    async def narrow(self, **rights: object) -> bytes:
        """Give up rights."""
        text = json.dumps(rights).encode()
        return await self.ask(b"NARROW %d\n%b" % (len(text), text))


def request(
    prompt: bytes = b"",
    preset: bytes = b"",
    inputs: bytes = b"",
    outputs: bytes = b"",
    flag: bytes = b"false",
) -> bytes:
    """Return an LLM_CHAT with exact counts."""
    parts = (inputs, outputs, prompt, preset)
    head = b"LLM_CHAT %b %d %d %d %d\n"
    inputs, outputs, prompt, preset = parts
    sizes = len(inputs), len(outputs), len(prompt), len(preset)
    return head % (flag, *sizes) + b"".join(parts)


def key_file(where: Path, key: str = KEY) -> str:
    """Write a key file that only its owner may read."""
    path = where / "key"
    path.write_text(key + "\n")
    path.chmod(0o600)
    canary.leave_out(str(path))
    return str(path)


def section(**values: Any) -> LlmSection:
    """Return a checked `[llm]`, as a configuration file has it."""
    found = msgspec.convert(values, LlmSection)
    assert not list(check(found))
    return found


@asynccontextmanager
async def open_scene(
    where: Path,
    *,
    state_dir: str | None = None,
    fds: Config | None = None,
    **values: Any,
) -> AsyncIterator[Scene]:
    """Open a host with `[llm]`; it ends with the block, and nothing of it is left.

    Args:
        where: for its files.
        state_dir: of the host.
        fds: what it says of LLM fds; None: there are none.
        values: of `[llm]`.
    """
    journal = open_journal(os.fspath(where / "journal"), pytest.fail)
    services = Services()
    try:
        async with serving(KEY) as provider:
            values.setdefault("base_url", provider.url)
            values.setdefault("api_key_file", key_file(where))
            async with open_hall(where) as hall:
                host: Any = _Host(hall, journal, services)
                async with AsyncExitStack() as stack:
                    service = await stack.enter_async_context(
                        open_llm(host, section(**values), state_dir)
                    )
                    if fds is not None:
                        options = fd_options(fds.tools, fds.file_descriptor)
                        place = fds.host.state_dir
                        opened = stack.enter_context(open_fds(host, options, place))
                        connect(opened, service)
                    scene = Scene(hall, provider, service, services)
                    scene.fence = host.fence
                    yield scene
                    for line in hall.lines:
                        line.close()
                        await line.gone()
                        for one in services:
                            one.client_gone(line.client)
                    if isinstance(services.fds, FdService):
                        assert not services.fds.store.blobs
                    assert not service.models.accounts.root.calls.reservations
                    assert not service.models.accounts.root.tokens.reserved
                assert services.llm is None
    finally:
        journal.close()


@pytest.fixture
async def scene(tmp_path: Path, no_leaks: None) -> AsyncIterator[Scene]:
    """Return a host with a model and without a limit."""
    del no_leaks
    async with open_scene(tmp_path) as opened:
        yield opened
