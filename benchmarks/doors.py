"""Costs of the endpoint by API, beside a direct call and LiteLLM's proxy.

The benchmark asks in the place of a child of ``sandhost run`` in the default sandbox: with
its token, on loopback. The stand-in (`demo/provider`, a process of its own) answers at
once, so all that is measured is the way. A bare socket sends bytes made before and looks
at little of what comes, the same for each server. LiteLLM is measured if ``--litellm``
names its command; it asks the same stand-in, in one process, as the host does.
"""

import json
import re
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import trio

from benchmarks.llm import KEY, provider
from benchmarks.measure import (
    MeasureError,
    clean_environment,
    workplace,
)
from benchmarks.options import add_sandhost, parse, parser
from benchmarks.report import Report, Row, at_least, at_most

NAME = "doors"
METHOD = "requests to each server in turn, medians; processor time by process"
ROUNDS = 200
WARM_UP = 20
AT_ONCE = 8
EVENTS = 200
START_S = 90.0
"""How long LiteLLM may take to start: it imports for most of a minute."""

CHILD = 'echo "$OPENAI_BASE_URL $OPENAI_API_KEY"; exec sleep 3600'
CONFIG = """
[llm]
base_url = "{url}"
api_key_file = "{key}"
endpoint = true
max_tokens = 1000
api = ["chat", "responses", "messages"]
[llm.models.translated]
base_url = "{url}"
api_key_file = "{key}"
[llm.quota]
max_tokens = 1000000000
[policy.run]
top_level = true
"""
LITELLM = """
model_list:
  - model_name: m
    litellm_params:
      model: openai/m
      api_base: {url}
      api_key: {key}
"""
LITELLM_KEY = "sk-of-a-bench-0123456789abcdef0123456789abcdef"
PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is asked.

    Attributes:
        url: its base URL.
        token: its token.
        pid: its process.
    """

    url: str
    token: str
    pid: int = 0

    @property
    def cpu_s(self) -> float:
        """The processor time that it has taken."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    def request(self, api: str, model: str, text: str, *, stream: bool) -> bytes:
        """Return a whole request."""
        body: dict[str, object] = {"model": model, "stream": stream}
        if api == "responses":
            body["input"] = text
        else:
            body["messages"] = [{"role": "user", "content": text}]
        if api == "messages":
            body["max_tokens"] = 1000
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/{PATHS[api]} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Authorization: Bearer {self.token}\r\nanthropic-version: 2023-06-01\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data

    async def connect(self) -> trio.SocketStream:
        """Connect to it."""
        port = int(self.url.rsplit(":", 1)[1].split("/")[0])
        return await trio.open_tcp_stream("127.0.0.1", port)


@contextmanager
def host(sandhost: Path, url: str) -> Iterator[Server]:
    """Run a host with one child in the default sandbox."""
    with workplace() as place:
        (place / "key").write_text(KEY, encoding="ascii")
        (place / "key").chmod(0o600)
        config = place / "config.toml"
        config.write_text(CONFIG.format(url=url, key=place / "key"), encoding="utf-8")
        command = [
            str(sandhost),
            "run",
            "--config",
            str(config),
            "--",
            "sh",
            "-c",
            CHILD,
        ]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, env=clean_environment()
        ) as process:
            try:
                words = process.stdout.readline().split() if process.stdout else []
                if len(words) != 2:
                    raise MeasureError("the child did not tell its endpoint")
                yield Server(words[0].decode(), words[1].decode(), process.pid)
            finally:
                process.terminate()


@contextmanager
def litellm(command: str, url: str) -> Iterator[Server]:
    """Run LiteLLM's proxy, in one process."""
    with workplace() as place, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        config = place / "config.yaml"
        config.write_text(LITELLM.format(url=url, key=KEY), encoding="utf-8")
        words = [*shlex.split(command), "--config", str(config), "--port", str(port)]
        env = {**clean_environment(), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        env["LITELLM_MASTER_KEY"] = LITELLM_KEY
        with subprocess.Popen(
            [*words, "--host", "127.0.0.1"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
            cwd=place,
        ) as process:
            try:
                _wait_for(port, process)
                yield Server(f"http://127.0.0.1:{port}/v1", LITELLM_KEY, process.pid)
            finally:
                process.terminate()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise MeasureError("LiteLLM did not start")


class Line:
    """A connection that is asked again and again."""

    def __init__(self, stream: trio.SocketStream, sent: bytes) -> None:
        self._stream = stream
        self._sent = sent
        self.first_ms = 0.0
        self.events = 0

    async def ask(self) -> float:
        """Ask once; return how long it took, in ms."""
        began = time.perf_counter()
        await self._stream.send_all(self._sent)
        data = b""
        while b"\r\n\r\n" not in data:
            data += await self._piece()
        head, _, body = data.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise MeasureError(f"refused: {data[:300]!r}")
        sizes = re.findall(rb"(?i)content-length: (\d+)", head)
        while not body:
            body += await self._piece()
        self.first_ms = 1000 * (time.perf_counter() - began)
        while (
            (len(body) < int(sizes[0]))
            if sizes
            else not body.endswith(b"\r\n0\r\n\r\n")
        ):
            body += await self._piece()
        self.events = body.count(b"data: ")
        return 1000 * (time.perf_counter() - began)

    async def _piece(self) -> bytes:
        piece = await self._stream.receive_some(65_536)
        if not piece:
            raise MeasureError("the connection ended")
        return bytes(piece)


Wanted = Mapping[str, tuple[Server, str, str]]
"""Name of a figure -> server, API, model."""


async def in_turn(
    wanted: Wanted, rounds: int, text: str, *, stream: bool
) -> dict[str, list[tuple[float, float, int]]]:
    """Ask each in turn; return (whole ms, first ms, events) of each request."""
    lines = {}
    for name, (server, api, model) in wanted.items():
        request = server.request(api, model, text, stream=stream)
        lines[name] = Line(await server.connect(), request)
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in lines}
    names = list(lines)
    for number in range(-WARM_UP, rounds):
        names = names[1:] + names[:1] if number % 2 else names[::-1]
        for name in names:
            took_ms = await lines[name].ask()
            if number >= 0:
                found[name].append((took_ms, lines[name].first_ms, lines[name].events))
    return found


async def rate(server: Server, rounds: int) -> float:
    """Return requests in a second of the server's processor time, some at once."""
    request = server.request("chat", "m", "!words=5", stream=False)
    lines = [Line(await server.connect(), request) for _ in range(AT_ONCE)]

    async def ask(line: Line, count: int) -> None:
        for _ in range(count):
            await line.ask()

    async def ask_all(count: int) -> float:
        began_s = server.cpu_s
        async with trio.open_nursery() as nursery:
            for line in lines:
                nursery.start_soon(ask, line, count)
        return server.cpu_s - began_s

    await ask_all(WARM_UP)
    return rounds * AT_ONCE / await ask_all(rounds)


Rows = Callable[[dict[str, Server], int], list[Row]]


def plain_rows(servers: dict[str, Server], rounds: int) -> list[Row]:
    """Compare whole answers, one after the other."""
    wanted = _wanted(servers)
    found = trio.run(lambda: in_turn(wanted, rounds, "!words=5", stream=False))
    medians = {
        name: statistics.median(took for took, _, _ in times)
        for name, times in found.items()
    }
    rows = []
    for name, (_, api, _) in wanted.items():
        if name.startswith("direct"):
            continue
        direct = medians[f"direct {'chat' if 'chat' in name else api}"]
        more = medians[name] - direct
        aim = None if name.startswith("LiteLLM") else at_most(1.0)
        detail = f"{medians[name]:.2f} / {direct:.2f} ms direct"
        data = {"ms": medians[name], "direct_ms": direct}
        rows.append(Row(f"{name} - direct", more, "ms", aim, detail, data))
    return rows


def stream_rows(servers: dict[str, Server], rounds: int) -> list[Row]:
    """Compare streams: their first byte, and each event."""
    wanted = _wanted(servers)
    text = f"!words={EVENTS}"
    count = max(5, rounds // 5)
    found = trio.run(lambda: in_turn(wanted, count, text, stream=True))
    rows = []
    for name, (_, api, _) in wanted.items():
        if name.startswith("direct"):
            continue
        own = found[name]
        direct = found[f"direct {'chat' if 'chat' in name else api}"]
        head_ms, direct_ms = _median(own, 1), _median(direct, 1)
        first = head_ms - direct_ms
        detail = f"{head_ms:.2f} / {direct_ms:.2f} ms direct"
        data = {"ms": head_ms, "direct_ms": direct_ms}
        rest = [whole - head for whole, head, _ in own]
        other = [whole - head for whole, head, _ in direct]
        each = (statistics.median(rest) - statistics.median(other)) / EVENTS
        is_peer = name.startswith("LiteLLM")
        aims = (None, None) if is_peer else (at_most(1.5), at_most(0.3))
        rows += [
            Row(f"{name}, first byte +", first, "ms", aims[0], detail, data),
            Row(f"{name}, each event +", each, "ms", aims[1]),
        ]
    return rows


def _median(times: list[tuple[float, float, int]], place: int) -> float:
    return statistics.median(one[place] for one in times)


def rate_rows(servers: dict[str, Server], rounds: int) -> list[Row]:
    """Compare requests in a second of processor time."""
    own = trio.run(rate, servers["host"], rounds)
    rows = [Row("requests a CPU second", own, "/s")]
    if "LiteLLM" in servers:
        other = trio.run(rate, servers["LiteLLM"], max(10, rounds // 5))
        detail = f"{own:.0f} / {other:.0f}"
        data = {"own": own, "litellm": other}
        name = "requests a CPU second / LiteLLM's"
        rows.append(Row(name, own / other, "x", at_least(8), detail, data))
    return rows


def _wanted(servers: dict[str, Server]) -> dict[str, tuple[Server, str, str]]:
    found = {}
    for api in PATHS:
        found[f"direct {api}"] = servers["direct"], api, "m"
        found[f"door {api}"] = servers["host"], api, "m"
        if api != "chat":
            found[f"door {api} by chat"] = servers["host"], api, "translated"
    if "LiteLLM" in servers:
        found["LiteLLM chat"] = servers["LiteLLM"], "chat", "m"
    return found


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print, and return the exit status."""
    options = parser(NAME, METHOD, rounds=ROUNDS)
    add_sandhost(options)
    options.add_argument("--litellm", help="the command of LiteLLM's proxy")
    given = parse(options, argv)
    rows: list[Row] = []
    with ExitStack() as stack:
        url = stack.enter_context(provider())
        servers = {"direct": Server(url, KEY)}
        servers["host"] = stack.enter_context(host(given.sandhost, url))
        if given.litellm:
            try:
                peer = stack.enter_context(litellm(given.litellm, url))
            except MeasureError as error:
                rows.append(Row("LiteLLM", None, "", detail=str(error)))
            else:
                servers["LiteLLM"] = peer
        parts: tuple[tuple[str, Rows], ...] = (
            ("plain", plain_rows), ("streams", stream_rows), ("rate", rate_rows),
        )  # fmt: skip
        for name, part in parts:
            try:
                rows += part(servers, given.rounds)
            except MeasureError as error:
                rows.append(Row(name, None, "", detail=str(error)))
    if not given.litellm:
        absent = "--litellm names no command"
        rows.append(Row("LiteLLM", None, "", detail=absent, is_absent=True))
    report = Report(NAME, METHOD, given.rounds, rows)
    return report.publish(save=given.save, strict=given.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
