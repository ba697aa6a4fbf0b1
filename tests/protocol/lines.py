"""The meaning of a single request line, as a message or the text of its refusal."""

from protocol import messages
from tests.protocol.streams import parse


def reply(line: bytes, dialect: int = 2) -> bytes:
    """Return the reply of a line that is refused."""
    (parsed,) = parse([line + b"\n"], dialect)
    assert isinstance(parsed.message, messages.Refusal)
    return parsed.message.reply


def message(line: bytes, dialect: int = 2) -> messages.Request:
    """Return what a line without payload means."""
    (parsed,) = parse([line + b"\n"], dialect)
    assert parsed.body == b""
    return parsed.message
