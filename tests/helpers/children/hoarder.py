"""A child that asks for much at once.

64 connections, each with the largest request.

    python -m tests.helpers.children.hoarder KIND

It asks once for little, writes `ready`, waits for a line of stdin, lets all ask at once, and
writes what each was answered, one line each, without what is long; then `over`, and waits for
one more line.
"""

import http.client
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from urllib.parse import urlsplit

from vfs.client import Client

CONNECTIONS = 64
"""As many as a child may have (``clients_per_child``), its first one among them."""

CHAT_BYTES = 8 * 1024 * 1024
BODY_BYTES = 16_500_000
IMAGE_BYTES = 15 * 1024 * 1024
CALL_BYTES = 16_000_000


# All connections ask for the same: it is made once.
@cache
def _words(size: int, first: str = "") -> str:
    return first + ("plain words, " * (size // 13 + 1))[:size]


Ask = Callable[[], str]


def _chat(client: Client, prompt: str, names: Sequence[str] = ()) -> Ask:
    def ask() -> str:
        found, _ = client.llm_chat_json(prompt, input_files=names)
        return found[:20].decode()

    return ask


def _prompt(client: Client) -> Ask:
    return _chat(client, _words(CHAT_BYTES - 100, "!wait=1 "))


def _short_names(client: Client) -> Ask:
    return _chat(client, "a", ["ab"] * (CHAT_BYTES // 3 - 100))


def _answers(client: Client) -> Ask:
    return _chat(client, "!huge=8")


@cache
def _chat_body() -> bytes:
    content = _words(BODY_BYTES, "!wait=1 ")
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


@cache
def _image_body() -> bytes:
    source = {"type": "base64", "media_type": "image/png", "data": "A" * IMAGE_BYTES}
    parts = [{"type": "text", "text": "!wait=1"}, {"type": "image", "source": source}]
    said = [{"role": "user", "content": parts}]
    return json.dumps({"messages": said, "max_tokens": 9}).encode()


def _endpoint(_client: Client) -> Ask:
    address = urlsplit(os.environ["OPENAI_BASE_URL"])
    assert address.hostname is not None
    line = http.client.HTTPConnection(address.hostname, address.port, timeout=300)
    body = _chat_body()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}

    def ask() -> str:
        line.request("POST", "/v1/chat/completions", body, headers)
        reply = line.getresponse()
        text = f"{reply.status} {reply.read().decode()}"
        assert reply.status == 200, f"{reply.getheader('retry-after')} {text}"
        return text[:60]

    return ask


def _images(_client: Client) -> Ask:
    address = urlsplit(os.environ["ANTHROPIC_BASE_URL"])
    assert address.hostname is not None
    line = http.client.HTTPConnection(address.hostname, address.port, timeout=300)
    body = _image_body()
    headers = {"Authorization": "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"]}

    def ask() -> str:
        line.request("POST", "/v1/messages", body, headers)
        reply = line.getresponse()
        text = f"{reply.status} {reply.read().decode()}"
        retry_after = reply.getheader("retry-after")
        assert reply.status == 200, f"retry-after {retry_after} {text}"
        return text[:60]

    return ask


def _call(client: Client) -> Ask:
    return lambda: client.fd_call("read_fd", name=_words(CALL_BYTES))[:60]


KINDS = {
    "prompt": _prompt,
    "short_names": _short_names,
    "answers": _answers,
    "endpoint": _endpoint,
    "images": _images,
    "call": _call,
}


def _tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Be it."""
    first = Client()
    first.llm_chat_json("hello")
    first.fd_call("list_fds")
    # To write as many names takes this process itself some seconds.
    count = 12 if sys.argv[1] == "short_names" else CONNECTIONS
    kind = KINDS[sys.argv[1]]
    asks = [kind(first), *(kind(first.attach()) for _ in range(count - 1))]
    said: list[str] = []

    def run(ask: Ask) -> None:
        try:
            said.append("OK " + ask())
        except (OSError, AssertionError) as why:
            said.append(f"{type(why).__name__} {why}"[:200])

    _tell("ready")
    sys.stdin.readline()
    threads = [threading.Thread(target=run, args=(ask,)) for ask in asks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _tell("\n".join(map(json.dumps, said)) + "\nover")
    sys.stdin.readline()


if __name__ == "__main__":
    main()
