"""Coverage-guided fuzzing of ToolExec's parsers.

    python tests/fuzz/fuzz_toolexec.py [-max_total_time=60] [libFuzzer options]

Each input is a way to cut a stream and the stream. It goes through the readers of heads
and bodies in one piece and in many, which must not differ, and what they accept through
h11, which must understand the same; then through `check`, which must answer anything.
"""

import sys
from pathlib import Path

import h11

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

MISSING = (
    "fuzz_toolexec: cannot fuzz: atheris is not installed: `make fuzz` installs it,"
    " where there is a wheel of it for this platform and this Python\n"
)

CHUNKED = b"POST /exec HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b"0123456789abcdef"


def pieces(data: bytes, sizes: bytes) -> list[bytes]:
    """Cut a stream at sizes; the rest is the last piece."""
    parts = []
    for size in sizes:
        parts.append(data[:size])
        data = data[size:]
    return [part for part in (*parts, data) if part]


def body_of(parts: list[bytes]) -> tuple[bytes, bytes, bool] | None:
    """Return (body, rest, whether it is complete); None if it is refused."""
    from protocol.toolexec import body as toolexec_body  # noqa: PLC0415 - see main()

    reader = toolexec_body.BodyReader([(b"transfer-encoding", b"chunked")], b"1.1")
    try:
        for part in parts:
            reader.feed(part)
    except (toolexec_body.FramingError, toolexec_body.BodyTooLargeError):
        return None
    return bytes(reader.body), reader.rest, reader.is_complete


def head_of(parts: list[bytes]) -> tuple[bytes, bytes] | str | None:
    """Return (head, what follows), None if it is not whole, a word if it is refused."""
    from protocol.toolexec import body as toolexec_body  # noqa: PLC0415 - see main()

    reader = toolexec_body.HeadReader()
    try:
        for index, part in enumerate(parts):
            found = reader.feed(part)
            if found is not None:
                return found[0], found[1] + b"".join(parts[index + 1 :])
    except toolexec_body.HeadTooLargeError:
        return "refused"
    return None


def check_body(data: bytes, sizes: bytes) -> None:
    """Compare the ways to read a body."""
    whole = body_of(pieces(data, b""))
    assert body_of(pieces(data, sizes)) == whole
    if whole is None or not data:
        return
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(CHUNKED)
    peer.receive_data(data)
    assert isinstance(peer.next_event(), h11.Request)
    body = b""
    while isinstance(event := peer.next_event(), h11.Data):
        body += event.data
    expected = (
        (body, peer.trailing_data[0], True)
        if isinstance(event, h11.EndOfMessage)
        else (body, b"", False)
    )
    assert whole == expected


def check_request(data: bytes) -> None:
    """Have a request of these bytes checked."""
    from protocol.toolexec import requests  # noqa: PLC0415 - see main()
    from protocol.toolexec.body import Head  # noqa: PLC0415

    target, _, rest = data.partition(b"\n")
    header, _, body = rest.partition(b"\n")
    headers = [
        (b"authorization", b"Bearer " + TOKEN),
        (b"authorization", header),
        (b"x-aifo-proto", b"2"),
    ]
    for where in (
        target,
        b"/exec?" + target,
        b"/exec/" + target,
        b"/signal",
        b"/notify",
    ):
        for method in (b"GET", b"POST"):
            head = Head(method, where, headers)
            found = requests.check(head, body, lambda given: TOKEN in given)
            if isinstance(found, requests.Refusal):
                assert found.body.count(b"\n") == 1
                assert found.body.endswith(b"\n")
                assert found.status in requests.REASONS


def check(data: bytes) -> None:
    """Run one input; raise if something is found."""
    sizes, stream = data[1 : 1 + data[:1][0] % 16], data[17:]
    check_body(stream, sizes)
    assert head_of(pieces(stream, sizes)) == head_of(pieces(stream, b""))
    check_request(stream)


def target(data: bytes) -> None:
    """Run one input of the fuzzer; nothing is an input, too."""
    check(data or b"\0")


def main(argv: list[str]) -> int:
    """Fuzz until libFuzzer ends the process; return 2 if it cannot be started."""
    try:
        import atheris  # noqa: PLC0415 - not on every platform
    except ImportError:
        sys.stderr.write(MISSING)
        return 2
    # Only what is imported here is instrumented, so nothing above imports the package.
    with atheris.instrument_imports(include=["protocol"]):
        import protocol.toolexec.requests  # noqa: F401, PLC0415
    atheris.Setup([argv[0], "-max_len=4096", *argv[1:]], target)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
