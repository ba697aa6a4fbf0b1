"""The golden transcripts of `tests/vectors`, each end against every line of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from protocol import ClientConnection, HostConnection, messages

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
PAGE = VECTORS.parents[1] / "docs" / "reference" / "protocol.md"


@dataclass
class Turn:
    """A request and its answer, with what each end makes of it."""

    request: bytes
    host: str = ""
    reply: bytes = b""
    child: str = ""


@dataclass
class Dialogue:
    """The bytes that travel on one connection."""

    name: str
    dialect: int = 2
    turns: list[Turn] = field(default_factory=list)


def read_vectors() -> Iterator[Dialogue]:
    """Yield every dialogue of every transcript, the examples of the page included."""
    for path in sorted(VECTORS.glob("*.txt")):
        yield from read_transcript(path.read_text(encoding="utf-8"), path.stem)
    blocks = PAGE.read_text(encoding="utf-8").split("```transcript\n")[1:]
    for block in blocks:
        yield from read_transcript(block.partition("```\n")[0], "page")


def read_transcript(text: str, stem: str) -> list[Dialogue]:
    """Return the dialogues of one file (see `tests/vectors/README.md`)."""
    dialogues: list[Dialogue] = []
    for number, line in enumerate(text.splitlines(), 1):
        sign, _, rest = line.strip().partition(" ")
        if sign == "==":
            dialogues.append(Dialogue(f"{stem}: {rest}"))
        elif sign not in ("", "#") and not _add(dialogues[-1], sign, rest):
            raise ValueError(f"{stem}:{number}: no such line: {line}")
    return dialogues


def _add(dialogue: Dialogue, sign: str, rest: str) -> bool:
    match sign:
        case "@":
            dialogue.dialect = int(rest.removeprefix("dialect "))
        case ">":
            dialogue.turns.append(Turn(_bytes(rest)))
        case "host:":
            dialogue.turns[-1].host = rest
        case "<":
            dialogue.turns[-1].reply = _bytes(rest)
        case "child:":
            dialogue.turns[-1].child = rest
        case _:
            return False
    return True


def _bytes(text: str) -> bytes:
    return text.encode().decode("unicode_escape").encode("latin-1")


DIALOGUES = list(read_vectors())


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
@pytest.mark.parametrize("dialogue", DIALOGUES, ids=lambda dialogue: dialogue.name)
def test_the_ends_agree_with_the_transcript(dialogue: Dialogue, size: int) -> None:
    host = HostConnection(dialogue.dialect)
    child = ClientConnection(dialogue.dialect)
    for turn in dialogue.turns:
        message = hear(host, turn.request, size)
        assert heard(message) == turn.host
        if message is None:
            assert not turn.reply, "a request that is not complete has no answer"
            continue
        assert not host.is_mid_message, "bytes are left over"
        if isinstance(message, messages.Refusal):
            assert message.reply == turn.reply
        reply, body = answer(child, message, turn.reply)
        assert repr(reply) == turn.child
        assert turn.reply.endswith(body)
        assert len(body) == reply.body


def hear(host: HostConnection, request: bytes, size: int) -> messages.Request | None:
    """Return the message that a request with its whole payload is, else None."""
    message = None
    payload = bytearray()
    for at in range(0, len(request), size):
        message = host.receive_data(request[at : at + size]) or message
        if message is None:
            continue
        payload += host.take_body()
        if not host.body_left and uncounted(message, bytes(payload)):
            host.extend_body(3)
            payload += host.take_body()
    return None if host.is_mid_message else message


def uncounted(message: messages.Request, payload: bytes) -> bool:
    """Tell whether a complete LLM_CHAT payload has three LFs on top (spec L1)."""
    match message:
        case messages.Chat():
            i, o, p = message.inputs, message.outputs, message.prompt
            preset = message.preset
        case messages.Refusal(parts=(i, o, p, preset)):
            pass
        case _:
            return False
    if len(payload) != i + o + p + preset or preset < 3:
        return False
    return {payload[i], payload[i + o + 1], payload[i + o + p + 2]} == {10}


def heard(message: messages.Request | None) -> str:
    """Return how a transcript writes what the host's end gives out."""
    match message:
        case None:
            return "nothing"
        case messages.Refusal(token=None):
            return "refusal"
        case messages.Refusal(token=bytes(token)):
            return f"refusal if fileno {token.decode()} is open"
        case _:
            return repr(message)


def answer(
    child: ClientConnection, message: messages.Request, reply: bytes
) -> tuple[messages.Reply, bytes]:
    """Return what the child's end makes of the answer, as one to this message."""
    try:
        child.send(message)
    except (KeyError, ValueError):
        # A refused line has no message of its own; every error reads the same.
        child.send(messages.Ping())
    child.receive_data(reply)
    parsed = child.next_reply()
    assert parsed is not None
    return parsed, child.take_body()


def test_every_request_of_the_transcripts_has_its_lines() -> None:
    for dialogue in DIALOGUES:
        assert dialogue.turns, dialogue.name
        for turn in dialogue.turns:
            whole = bool(turn.reply and turn.child)
            assert whole is (turn.host != "nothing"), (dialogue.name, turn)


def test_the_names_of_the_dialogues_are_unique() -> None:
    names = [dialogue.name for dialogue in DIALOGUES]
    assert sorted(set(names)) == sorted(names)


def test_bytes_are_written_as_in_a_literal() -> None:
    text = "== a\n> \\x00\\\\é\\n\n  host: nothing\n"
    (dialogue,) = read_transcript(text, "t")
    assert dialogue.turns[0].request == b"\x00\\\xc3\xa9\n"


def test_a_line_that_is_none_is_told_with_its_place() -> None:
    with pytest.raises(ValueError, match="t:2: no such line: = x"):
        read_transcript("== a\n= x\n", "t")
