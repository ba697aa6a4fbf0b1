"""The way to a provider, against servers that a test leads by the hand (L11, L15)."""

import gzip
import json
import ssl
from pathlib import Path

import pytest
import trio

from demo.provider import serving
from supervisor.fsproxy.ports import LEAVE_S
from supervisor.fsproxy.replies import PROCESS_EXIT
from supervisor.llm.transport import proxy_for
from tests.helpers.canary import KEY
from tests.helpers.certificates import certificate
from tests.helpers.sessions import chat_request
from tests.helpers.stage import eventually, open_model_stage
from tests.supervisor.llm.led_provider import hanging_up_first, reply, request, server

FAILED = b"ERROR OpenAI API call failed: "


def whole(text: str = "hello") -> bytes:
    """Return the body of an answer."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return json.dumps({"choices": [choice], "usage": usage}).encode()


async def test_a_connection_serves_one_call_after_the_other(
    tmp_path: Path, no_leaks: None
) -> None:
    del no_leaks
    asked = connections = 0

    async def handle(stream: trio.abc.Stream) -> None:
        nonlocal asked, connections
        connections += 1
        while await request(stream):
            asked += 1
            await stream.send_all(reply(whole()))

    async with server(handle) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url) as stage:
            line = stage.connect()
            for _ in range(3):
                assert (await line.chat(b"a")).text == "hello"
            # Of what the host holds, this is the provider's.
            told = dict(stage.llm.models.default.descriptors())
            assert list(told.values()) == ["model provider"]
    assert (asked, connections) == (3, 1)


# spec L11: a connection that its server has closed meanwhile is not used again.
async def test_a_connection_that_was_closed_is_made_anew(tmp_path: Path) -> None:
    served = 0

    async def handle(stream: trio.abc.Stream) -> None:
        nonlocal served
        if await request(stream):
            served += 1
            await stream.send_all(reply(whole()))

    async with server(handle) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url) as stage:
            line = stage.connect()
            for number in range(1, 4):
                assert (await line.chat(b"a")).text == "hello"
                assert served == number


# spec L11: a connection that breaks before there is an answer is tried again.
@pytest.mark.slow
async def test_a_broken_connection_is_tried_again(tmp_path: Path) -> None:
    handle, got = hanging_up_first(reply(whole()))
    async with server(handle) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url) as stage:
            assert (await stage.connect().chat(b"a")).text == "hello"
            assert stage.llm.models.accounts.root.tokens.used == 5.0  # once: 1 + 4 * 1
    assert len(got) == 2


# spec L10: what the provider had reported when the client went away is what is charged,
# be it more than came or less.
@pytest.mark.parametrize("end", ["close", "process"])
async def test_a_report_is_charged_to_who_has_gone(tmp_path: Path, end: str) -> None:
    sent = trio.Event()

    async def handle(stream: trio.abc.Stream) -> None:
        await request(stream)
        usage = {"prompt_tokens": 70, "completion_tokens": 20, "total_tokens": 90}
        events = [
            {"choices": [{"index": 0, "delta": {"content": "some words"}}]},
            {"choices": [], "usage": usage},
        ]
        text = b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in events)
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n" + text)
        sent.set()
        while await stream.receive_some(100):
            pass

    async with server(handle) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url) as stage:
            line = stage.connect()
            await line.send(chat_request(b"a"))
            await sent.wait()
            if end == "close":
                line.close()
                await line.gone()
            else:
                await line.session.finish(PROCESS_EXIT)
            assert stage.llm.models.accounts.root.tokens.used == 70 + 4 * 20
            (told,) = stage.events("llm.called")
            assert (told["outcome"], told["completion_tokens"]) == ("cancelled", 20)


# spec L10, S4: a call outlives its client by a moment, for what is on its way; the
# moment is short, for a dead child is cleaned up within ten milliseconds.
async def test_what_is_on_its_way_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 < LEAVE_S <= 0.005
    monkeypatch.setattr("supervisor.llm.chat.LEAVE_S", 5.0)  # on a busy machine
    began, gone = trio.Event(), trio.Event()

    async def handle(stream: trio.abc.Stream) -> None:
        await request(stream)
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n: wait\n\n")
        began.set()
        await gone.wait()
        usage = {"prompt_tokens": 70, "completion_tokens": 20, "total_tokens": 90}
        piece = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}
        event = {"choices": [piece], "usage": usage}
        text = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(event).encode()
        await stream.send_all(text)

    async with server(handle) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url) as stage:
            line = stage.connect()
            await line.send(chat_request(b"a"))
            await began.wait()
            line.close()
            await eventually(lambda: line.session.is_closing)
            gone.set()
            await line.gone()
            assert stage.llm.models.accounts.root.tokens.used == 70 + 4 * 20


# spec L11: who refuses a long request early, and hangs up, is heard all the same.
async def test_an_early_refusal_is_heard(tmp_path: Path) -> None:
    async def handle(stream: trio.abc.Stream) -> None:
        await stream.receive_some(1000)
        error = b'{"error": {"message": "far too long"}}'
        await stream.send_all(reply(error, b"413 No", b"Connection: close\r\n"))
        while await stream.receive_some(65_536):
            pass

    async with server(handle) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url) as stage:
            said = await stage.connect().chat(b"word " * 1_000_000)
            assert said.line == FAILED + b"413 far too long"
            assert stage.llm.models.accounts.root.tokens.used == 0.0


# spec L11, L15: no answer, no HTTP, half of one.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"", b"cannot connect: "),
        (b"220 mail.example ready\r\n", b"cannot connect: "),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", b"invalid response: broken"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n", b"invalid response: "),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000, b"cannot connect: "),
        (b"HTTP/1.1 302 No\r\nLocation: http://127.0.0.1:1/\r\n\r\n", b"302 No"),
    ],
)
async def test_what_is_no_answer_is_one_line(
    tmp_path: Path, sent: bytes, said: bytes
) -> None:
    async def handle(stream: trio.abc.Stream) -> None:
        if await request(stream) and sent:
            await stream.send_all(sent)

    async with server(handle) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url) as stage:
            line = stage.connect()
            assert (await line.chat(b"a")).line.startswith(FAILED + said)
            assert await line.ask(b"PING\n") == b"OK"


# 400 bytes could become gigabytes, in the Trio thread.
@pytest.mark.parametrize("status", [b"200 OK", b"400 No"])
async def test_a_packed_answer_is_refused(tmp_path: Path, status: bytes) -> None:
    asked = 0

    async def handle(stream: trio.abc.Stream) -> None:
        nonlocal asked
        while await request(stream):
            asked += 1
            packed = gzip.compress(whole("packed"))
            await stream.send_all(reply(packed, status, b"Content-Encoding: gzip\r\n"))

    async with server(handle) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url) as stage:
            line = stage.connect()
            said = (await line.chat(b"a")).line
            assert said.startswith(FAILED)
            assert said.endswith(b"is packed (gzip); identity was asked for")
            assert await line.ask(b"PING\n") == b"OK"
    assert asked == 1


async def test_a_refusal_in_any_charset_is_one_line(tmp_path: Path) -> None:
    charsets = [b"hex", b"idna", b"undefined", b"utf-16", b"no such"]
    waiting = list(charsets)

    async def handle(stream: trio.abc.Stream) -> None:
        while await request(stream):
            told = b"Content-Type: text/plain; charset=%b\r\n" % waiting.pop(0)
            error = b'{"error": {"message": "far too long"}}'
            await stream.send_all(reply(error, b"413 No", told))

    async with server(handle) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url) as stage:
            line = stage.connect()
            for _ in charsets:
                said = await line.chat(b"a")
                assert said.line == FAILED + b"413 far too long"


async def test_cookies_of_one_call_are_not_sent_with_another(tmp_path: Path) -> None:
    heads: list[bytes] = []

    async def handle(stream: trio.abc.Stream) -> None:
        while data := await request(stream):
            heads.append(data.partition(b"\r\n\r\n")[0].lower())
            await stream.send_all(reply(whole(), more=b"Set-Cookie: child=1\r\n"))

    async with server(handle) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url) as stage:
            for _ in range(2):
                assert (await stage.connect().chat(b"a")).text == "hello"
    assert len(heads) == 2
    assert b"cookie" not in heads[1]


# The first try may have cost something.
async def test_a_try_without_an_answer_is_charged_though_the_next_is_refused(
    tmp_path: Path,
) -> None:
    error = b'{"error": {"message": "no such model"}}'
    handle, got = hanging_up_first(reply(error, b"404 No"))
    async with server(handle) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url) as stage:
            said = (await stage.connect().chat(b"a")).line
            assert said == FAILED + b"404 no such model"
            assert stage.llm.models.accounts.root.tokens.used > 0
    assert len(got) == 2


# spec L13: https, with a certificate that the host trusts, and with one that it does not.
@pytest.mark.slow
async def test_an_encrypted_provider_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    del no_leaks
    path = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path)
    served: list[bytes] = []

    async def handle(stream: trio.abc.Stream) -> None:
        while data := await request(stream):
            served.append(data)
            await stream.send_all(reply(whole("secret")))

    async with server(handle, context) as port:
        url = f"https://localhost:{port}/v1"
        for number, trusted in enumerate((False, True)):
            where = tmp_path / str(number)
            where.mkdir()
            if trusted:
                monkeypatch.setenv("SSL_CERT_FILE", str(path))
            async with open_model_stage(where, base_url=url) as stage:
                line = stage.connect()
                said = await line.chat(b"a")
                if not trusted:
                    assert said.line.startswith(FAILED + b"cannot connect: ")
                    assert b"CERTIFICATE_VERIFY_FAILED" in said.line
                    assert not served
                    continue
                assert said.text == "secret"
                assert (await line.chat(b"a")).text == "secret"
                assert len(stage.llm.models.default.descriptors().__next__()) == 2
    assert len(served) == 2


# Nothing is kept of calls whose clients hang up, also in the middle of a handshake.
@pytest.mark.parametrize("way", ["direct", "tunnel"])
async def test_a_handshake_of_a_client_that_hangs_up_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    greeted = trio.Event()

    async def handle(stream: trio.abc.Stream) -> None:
        if way == "tunnel":
            await stream.receive_some(65_536)
            await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
        assert await stream.receive_some(1) == b"\x16"  # of a ClientHello
        greeted.set()
        while await stream.receive_some(65_536):
            pass

    for name in ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with server(handle) as port:
        if way == "tunnel":
            monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        url = f"https://localhost:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url) as stage:
            line = stage.connect()
            await line.send(chat_request(b"a"))
            await greeted.wait()
            line.close()
            await line.gone()
            assert not list(stage.llm.models.default.descriptors())


async def test_a_fault_behind_an_error_is_not_told(tmp_path: Path) -> None:
    async def handle(stream: trio.abc.Stream) -> None:
        await request(stream)
        event = b'data: {"error": {"message": "bad day"}}\n\n'
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        chunk = b"%x\r\n%b\r\nzzz\r\n" % (len(event), event)
        await stream.send_all(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
        await stream.receive_some(1)

    async with server(handle) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url) as stage:
            line = stage.connect()
            assert (await line.chat(b"a")).line == FAILED + b"bad day"
            assert await line.ask(b"PING\n") == b"OK"


# Proxies of the host's environment are used for providers.
async def test_a_proxy_of_the_environment_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with serving(KEY) as proxy:
        monkeypatch.setenv("http_proxy", f"http://user:pa%20ss@127.0.0.1:{proxy.port}")
        url = "http://model.invalid/v1"
        async with open_model_stage(tmp_path, base_url=url) as stage:
            assert (await stage.connect().chat(b"a b")).text.endswith("2 words.")
        (served,) = proxy.served
        assert served.path == "http://model.invalid/v1/chat/completions"
        assert served.headers["proxy-authorization"] == "Basic dXNlcjpwYSBzcw=="


@pytest.mark.parametrize(
    ("variables", "address", "found"),
    [
        ({}, "http://a/v1", None),
        ({"http_proxy": "p:3128"}, "http://a/v1", "p"),
        ({"http_proxy": "http://p"}, "https://a/v1", None),
        ({"all_proxy": "http://p"}, "https://a/v1", "p"),
        ({"http_proxy": "http://p", "no_proxy": "a,b"}, "http://a:80/v1", None),
        ({"http_proxy": "http://p", "no_proxy": "*"}, "http://a/v1", None),
    ],
)
def test_whether_there_is_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    address: str,
    found: str | None,
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    proxy = proxy_for(address)
    assert (None if proxy is None else proxy.url.host) == found


@pytest.mark.parametrize(
    "address",
    [
        "socks5://user:secret@p:1080",
        "ftp://secret",
        "://secret",
        "p:x",
    ],
)
def test_a_proxy_of_another_kind_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("all_proxy", address)
    with pytest.raises(OSError, match="no HTTP proxy's address; set http") as failed:
        proxy_for("http://a/v1")
    assert "secret" not in str(failed.value)
