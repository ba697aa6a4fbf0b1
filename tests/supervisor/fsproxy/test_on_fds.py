"""FD_CALL and FD_PUT on the wire: what a child sends, what it is answered."""

import json
import time
from collections.abc import Iterator

import pytest
import trio

from supervisor.fsproxy.handlers import fds
from supervisor.llmfd import FdError, Store
from supervisor.llmfd.service import FdService
from tests.helpers.sessions import Hall, Line, hall

__all__ = ["hall"]

TOOLS = frozenset({"read_fd", "fd_to_file"})


@pytest.fixture
def service(hall: Hall) -> Iterator[FdService]:
    """LLM fds of a hall, with two tools listed."""
    made = FdService(hall.fs, Store(), TOOLS)
    yield made
    made.close()
    assert not made.store.blobs
    assert made.store.memory_bytes == 0


def connected(hall: Hall, service: FdService, **options: object) -> Line:
    """Connect a client that has LLM fds."""
    line = hall.connect(**options)  # type: ignore[arg-type]
    line.session.services.fds = service
    return line


async def call(line: Line, name: str, /, **arguments: object) -> str:
    """FD_CALL; the body of the answer."""
    document = json.dumps({"name": name, "arguments": arguments}).encode()
    await line.send(b"FD_CALL %d\n%b" % (len(document), document))
    return (await line.body()).decode()


async def said(line: Line, document: bytes) -> bytes:
    """FD_CALL with any document; the reply line."""
    return await line.ask(b"FD_CALL %d\n%b" % (len(document), document))


async def test_content_goes_in_and_is_read_by_pages(
    hall: Hall, service: FdService
) -> None:
    line = connected(hall, service)
    text = "".join(f"line {n}\n" for n in range(2000))
    result = await call(line, "wrap_output", text=text, source="tool:log")
    assert result.startswith('<fd_result fd="fd:1" pages="5" truncated="false" ')
    assert "Output exceeds 8000 characters." in result
    page = await call(line, "read_fd", fd="fd:1", page=2)
    assert page.startswith('<fd_content fd="fd:1" page="2" pages="5" ')


async def test_a_short_text_is_its_own_answer(hall: Hall, service: FdService) -> None:
    line = connected(hall, service)
    assert await call(line, "wrap_output", text="short <&>") == "short <&>"
    assert await call(line, "wrap_input", text="") == ""
    assert await call(line, "list_fds") == '<fd_list count="0"/>'


async def test_content_comes_in_pieces(hall: Hall, service: FdService) -> None:
    line = connected(hall, service)
    assert await line.ask(b"FD_PUT 5\n" + b"a" * 5) == b"OK t1"
    assert await line.ask(b"FD_PUT 9000 t1\n" + b"b" * 9000) == b"OK t1"
    assert await line.ask(b"FD_PUT 0 t1\n") == b"OK t1"
    result = await call(line, "wrap_output", token="t1")
    assert 'pages="3"' in result
    answer = await call(line, "read_fd", fd="fd:1", read_all=True)
    assert "a" * 5 + "b" * 9000 in answer
    # Used up: the token means nothing any more.
    assert await line.ask(b"FD_PUT 3 t1\nabc") == b"ERROR invalid token: t1"
    assert "invalid_parameter" in await call(line, "wrap_output", text={"token": "t1"})


async def test_a_token_belongs_to_its_client(hall: Hall, service: FdService) -> None:
    line, other = connected(hall, service), connected(hall, service)
    assert await line.ask(b"FD_PUT 1\nx") == b"OK t1"
    assert await other.ask(b"FD_PUT 1 t1\nx") == b"ERROR invalid token: t1"
    assert await other.ask(b"PING\n") == b"OK"


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (b"", b"not JSON"),
        (b"{", b"not JSON"),
        (b"\xff", b"not UTF-8"),
        (b"[" * 60_000, b"nested too deep"),
        (b"[]", b"write {"),
        (b'{"name":1}', b"write {"),
        (b'{"name":"read_fd","arguments":[1]}', b"write {"),
        # spec llm-fd 6: only null and absent are no arguments.
        (b'{"name":"list_fds","arguments":[]}', b"write {"),
        (b'{"name":"list_fds","arguments":""}', b"write {"),
        (b'{"name":"list_fds","arguments":0}', b"write {"),
        (b'{"name":"list_fds","arguments":false}', b"write {"),
        (b'{"name":"read_fd","more":1}', b"write {"),
        (b'{"name":"close_fd"}', b"unknown name: close_fd"),
        (b'{"name":"search_fd"}', b"not enabled: search_fd"),
        (b'{"name":"a\\nOK 0"}', b"unknown name: a?OK 0"),
    ],
)
async def test_what_is_no_call_is_an_error_line(
    hall: Hall, service: FdService, document: bytes, why: bytes
) -> None:
    line = connected(hall, service)
    assert (await said(line, document)).startswith(b"ERROR invalid fd call: " + why)
    assert await line.ask(b"PING\n") == b"OK"


# spec llm-fd 6
@pytest.mark.parametrize("arguments", [b"", b',"arguments":null', b',"arguments":{}'])
async def test_a_call_without_arguments_says_none_or_null(
    hall: Hall, service: FdService, arguments: bytes
) -> None:
    line = connected(hall, service)
    document = b'{"name":"list_fds"%b}' % arguments
    await line.send(b"FD_CALL %d\n%b" % (len(document), document))
    assert await line.body() == b'<fd_list count="0"/>'


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({}, "invalid_parameter"),
        ({"fd": None}, "invalid_parameter"),
        ({"fd": 1}, "invalid_parameter"),
        ({"fd": "fd:9"}, "not_found"),
        ({"fd": "\ud800"}, "not_found"),
        ({"fd": "fd:1", "pages": 1}, "invalid_parameter"),
        ({"fd": "fd:1", "page": 1.5}, "invalid_parameter"),
        ({"fd": "fd:1", "page": True}, "invalid_parameter"),
    ],
)
async def test_a_tools_error_is_an_answer(
    hall: Hall, service: FdService, arguments: dict[str, object], kind: str
) -> None:
    line = connected(hall, service)
    answer = await call(line, "read_fd", **arguments)
    assert answer.startswith(f'<fd_error type="{kind}" fd="')


async def test_without_the_section_the_payload_is_taken_and_refused(hall: Hall) -> None:
    line = hall.connect()
    assert await said(line, b"{}") == b"ERROR LLM fds not available"
    assert await line.ask(b"FD_PUT 3\nabc") == b"ERROR LLM fds not available"
    assert await line.ask(b"PING\n") == b"OK"


async def test_a_piece_beyond_the_cap_is_taken_and_refused(
    hall: Hall, service: FdService
) -> None:
    line = connected(hall, service, max_write_bytes=10)
    assert await line.ask(b"FD_PUT 11\n" + b"x" * 11) == (
        b"ERROR invalid size: 11 exceeds limit 10"
    )
    assert await said(line, b"x" * 11) == b"ERROR invalid size: 11 exceeds limit 10"


async def test_what_a_client_kept_is_freed_with_it(
    hall: Hall, service: FdService
) -> None:
    line, other = connected(hall, service), connected(hall, service)
    for one in (line, other):
        await call(one, "wrap_output", text="x" * 9000)
        assert await one.ask(b"FD_PUT 4\nopen") == b"OK t1"
    assert len(service.store.blobs) == 1
    service.client_gone(line.client)
    assert "x" * 9000 in await call(other, "read_fd", fd="fd:1", read_all=True)
    service.client_gone(other.client)
    assert not service.store.blobs
    assert service.store.memory_bytes == 0


async def test_what_one_child_keeps_is_bounded(hall: Hall) -> None:
    service = FdService(hall.fs, Store(), TOOLS, max_store=20_000)
    line, other = connected(hall, service), connected(hall, service)
    assert "fd_result" in await call(line, "wrap_output", text="x" * 15_000)
    answer = await call(line, "wrap_output", text="y" * 15_000)
    assert "Cannot store content: Disk quota exceeded" in answer
    assert (await line.ask(b"FD_PUT 6000\n" + b"z" * 6000)).startswith(
        b"ERROR failed to put: Cannot store content: Disk quota exceeded"
    )
    assert "fd_result" in await call(other, "wrap_output", text="y" * 15_000)
    # Pieces count, over all contents that a client has begun.
    assert await line.ask(b"FD_PUT 3000\n" + b"z" * 3000) == b"OK t2"
    assert (await line.ask(b"FD_PUT 3000\n" + b"z" * 3000)).startswith(b"ERROR failed")
    allowance = service.process_of(line.client).shared.allowance
    assert allowance is not None
    assert allowance.used == 18_000
    assert await call(line, "wrap_output", token="t2") == "z" * 3000
    assert allowance.used == 15_000
    service.close()
    assert allowance.used == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "document",
    [
        b'{"name": "list_fds", "arguments": {"a": [' + b"[]," * 1_000_000 + b"[]]}}",
        b'{"name": "list_fds", "arguments": {"a": [' + b'"",' * 1_000_000 + b'""]}}',
        b'"' * 3_000_000,
    ],
)
def test_a_call_of_countless_values_is_refused_unread(document: bytes) -> None:
    # spec S5: a decoder would keep every client waiting for seconds.
    begin = time.process_time()
    with pytest.raises(ValueError, match="more than 50000 values; put long content"):
        fds.decoded_size(document)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    "text", ["x" * 300_000, '[{"\\,' * 50_000, "\ud800" * 70_000, "é😀\n" * 50_000]
)
@pytest.mark.parametrize("shape", ["text", "blocks"])
def test_a_long_text_in_a_call_is_what_it_is(text: str, shape: str) -> None:
    value = text if shape == "text" else [{"type": "text", "text": text}] * 2
    document = json.dumps({"name": "wrap_output", "arguments": {shape: value}}).encode()
    assert fds.parse_call(document) == ("wrap_output", {shape: value})


@pytest.mark.parametrize(
    ("tail", "said"), [(b"", "not JSON: "), (b"}} {", "not JSON: Extra data")]
)
def test_a_long_document_that_is_none_is_told_as_a_short_one(
    tail: bytes, said: str
) -> None:
    document = b'{"name": "wrap_output", "arguments": {"text": "%b"' % (b"x" * 100_000)
    with pytest.raises(ValueError, match=said):
        fds.parse_call(document + tail)


async def test_a_content_counts_once_until_its_last_holder_has_gone(
    hall: Hall,
) -> None:
    service = FdService(hall.fs, Store(), TOOLS, max_store=20_000)
    line = connected(hall, service)
    process = service.process_of(line.client)
    allowance = process.shared.allowance
    assert allowance is not None
    for _ in range(3):
        assert "fd_result" in await call(line, "wrap_output", text="x" * 15_000)
    assert allowance.used == 15_000
    fork = process.fork()
    await call(line, "keep_fds", fds=[])
    assert allowance.used == 15_000  # the fork has it
    answer = await call(line, "wrap_output", text="y" * 15_000)
    assert "Cannot store content: Disk quota exceeded" in answer
    fork.close()
    assert allowance.used == 0
    # A client that gives descriptors up can go on for ever.
    for number in range(10):
        answer = await call(line, "wrap_output", text=f"{number}" * 15_000)
        assert "fd_result" in answer
        await call(line, "keep_fds", fds=[])
    assert allowance.used == 0
    assert not service.store.blobs
    service.close()


async def test_without_a_thread_a_call_is_an_error_and_its_client_goes_on(
    hall: Hall, service: FdService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.enabled = None
    line = connected(hall, service)
    text = "line\n" * 100_000
    await call(line, "wrap_output", text=text)
    run_sync = trio.to_thread.run_sync

    def none(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    refused = '<fd_error type="file_operation" fd="'
    why = "Resource temporarily unavailable"
    long = json.dumps({"name": "wrap_output", "arguments": {"text": text}}).encode()
    process = service.process_of(line.client)
    for _ in range(2):
        monkeypatch.setattr(trio.to_thread, "run_sync", none)
        for name, arguments in (
            ("read_fd", {"fd": "fd:1", "start_line": 90_000, "end_line": 90_001}),
            ("search_fd", {"fd": "fd:1", "query": "a"}),
            ("fd_to_file", {"fd": "fd:1", "file_path": "a"}),
        ):
            answer = await call(line, name, **arguments)
            assert answer.startswith(refused), answer
            assert why in answer
        assert await said(line, long) == b"ERROR invalid fd call: %b" % (
            f"Cannot work on content: {why}".encode()
        )
        assert await line.ask(b"FD_PUT 3\nabc") == b"ERROR failed to put: %b" % (
            f"Cannot work on content: {why}".encode()
        )
        with pytest.raises(FdError, match=why):
            await process.add_waiting(service.store.put(text.encode() * 2), "test")
        monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
        assert (await call(line, "search_fd", fd="fd:1", query="a")).startswith(
            '<fd_search fd="fd:1" query="a" matches="0"'
        )
        assert not process.has_begun("t1")
    assert not (hall.root / "a").exists()
