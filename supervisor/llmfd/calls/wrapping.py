"""The calls that put content in: long content is stored, its first page shown.

Long means more characters than the limit. Errors and answers of the LLM fd tools are
never stored: errors are read at once, and the answers are cut already.
"""

from __future__ import annotations

import binascii
import json
from typing import TYPE_CHECKING

from protocol import fdxml
from supervisor.llmfd.calls.naming import take_text
from supervisor.llmfd.errors import INVALID_PARAMETER, FdError, check_length
from supervisor.llmfd.selection import show

if TYPE_CHECKING:
    from supervisor.llmfd.arguments import Json
    from supervisor.llmfd.blob import Content
    from supervisor.llmfd.process import Process
    from supervisor.llmfd.table import LlmFd
    from supervisor.llmfd.uploads import PartialContent

TOOL_SOURCE = "tool_output"
INPUT_SOURCE = "user_input"
MOST_SOURCE_CHARS = 500
INPUT_MESSAGE = "Large user input has been stored in a file descriptor."


def wrap_output(  # noqa: PLR0913 - the parameters of the call
    process: Process,
    *,
    text: str | dict[str, str] | None = None,
    base64: str | None = None,
    blocks: list[dict[str, Json]] | None = None,
    token: str | None = None,
    source: str = TOOL_SOURCE,
    is_error: bool = False,
) -> bytes:
    """Return a tool's output, or the ``fd_result`` of a long one."""
    given = [value for value in (text, base64, blocks, token) if value is not None]
    if len(given) != 1:
        words = "Give one of: text, base64, blocks, token"
        raise FdError(INVALID_PARAMETER, words)
    if len(source) > MOST_SOURCE_CHARS:
        words = f"source has more than {MOST_SOURCE_CHARS} characters"
        raise FdError(INVALID_PARAMETER, words)
    unchanged = is_error or source.removeprefix("tool:") in process.shared.tools
    limit = -1 if unchanged else process.shared.settings.max_output
    if blocks is not None:
        return _wrap_blocks(process, blocks, source, limit)
    if base64 is not None:
        content = process.shared.store.put(_decode(base64))
    elif token is not None:
        content = process.begun.take(token)
    else:
        content = take_text(process, text or "")
    return wrap(process, content, source, limit, describe_excess(limit))


def wrap_upload(process: Process, upload: PartialContent, source: str) -> bytes:
    """Return the output of the host's own tool, or the ``fd_result`` of a long one."""
    limit = process.shared.settings.max_output
    return wrap(process, upload.finish(), source, limit, describe_excess(limit))


def wrap_input(
    process: Process,
    *,
    text: str | dict[str, str] | None = None,
    token: str | None = None,
) -> bytes:
    """Return a user's input, or the ``fd_result`` of a long one."""
    if (text is None) == (token is None):
        raise FdError(INVALID_PARAMETER, "Give one of: text, token")
    content = (
        take_text(process, text or "") if token is None else process.begun.take(token)
    )
    settings = process.shared.settings
    limit = settings.max_input if settings.page_input else -1
    return wrap(process, content, INPUT_SOURCE, limit, INPUT_MESSAGE)


def describe_excess(limit: int) -> str:
    """Return the message about an output that is longer than a limit."""
    return f"Output exceeds {limit} characters. Use read_fd to read more pages."


def wrap(
    process: Process, content: Content, source: str, limit: int, message: str
) -> bytes:
    """Return a content that the caller holds, or the ``fd_result`` of a long one.

    Args:
        process: gets the content.
        content: the output or input.
        source: its source.
        limit: characters; negative for none.
        message: the message if it is longer.
    """
    text = content.text
    if limit < 0 or text.index.chars <= limit:
        try:
            check_length(text.size, "hand it on as output, to be stored")
            return text[:]
        finally:
            process.shared.store.drop(content)
    store = process.shared.store
    store.hold(content)  # its client may end while it is shown
    try:
        return result_xml(process, process.add(content, source), message)
    finally:
        store.drop(content)


def result_xml(process: Process, fd: LlmFd, message: str) -> bytes:
    """Return the ``fd_result`` of a descriptor: facts and first page."""
    text = fd.content.text
    pages = text.pages(fd.page_size)
    shown = show(fd, pages.span(1))
    attributes: list[tuple[str, str | int | bool]] = [
        ("fd", fd.id),
        ("pages", len(pages)),
        ("truncated", shown.is_truncated),
        ("lines", shown.lines),
        ("total_lines", text.index.lines),
    ]
    if fd.is_binary:
        attributes.append(("encoding", "base64"))
    raw = process.shared.settings.raw
    return fdxml.result(attributes, message, shown.text, raw=raw)


def _wrap_blocks(
    process: Process, blocks: list[dict[str, Json]], source: str, limit: int
) -> bytes:
    """Return a list of blocks, each text in it wrapped by itself (as MCP has them).

    Raises:
        FdError: one of them cannot be stored or written; then none was stored.
    """
    before = set(process.table.fds)
    try:
        done = [_wrap_block(process, block, source, limit) for block in blocks]
        return json.dumps(done, ensure_ascii=False).encode()
    except (FdError, UnicodeEncodeError, RecursionError) as why:
        process.table.keep_only(before)
        if isinstance(why, FdError):
            raise
        # Writing needs a little more of the stack than reading did.
        text = "The blocks are nested too deep"
        if isinstance(why, UnicodeEncodeError):
            text = "The blocks have a lone surrogate, which is no character"
        raise FdError(INVALID_PARAMETER, text) from None


def _wrap_block(
    process: Process, block: dict[str, Json], source: str, limit: int
) -> dict[str, Json]:
    text = block.get("text")
    if block.get("type", "text") != "text" or not isinstance(text, str):
        return block
    if limit < 0 or len(text) <= limit:
        return block
    content = process.put_text(text)
    wrapped = wrap(process, content, source, limit, describe_excess(limit))
    return {**block, "text": wrapped.decode()}


def _decode(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError):
        raise FdError(INVALID_PARAMETER, "base64 is not valid base64") from None
