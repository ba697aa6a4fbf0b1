"""LLM fds without a host: a process of a model, and what its answers say."""

from functools import partial
from xml.etree import ElementTree as ET

import trio

from supervisor.llmfd import TOOLS, ContentSettings, Process, ProcessParts, Store


def process(page_size: int = 4000, **settings: object) -> Process:
    """Return a process with an empty table and a store of its own."""
    chosen = ContentSettings(page_size=page_size, **settings)  # type: ignore[arg-type]
    return Process(ProcessParts(Store(), TOOLS, settings=chosen))


def holding(text: str | bytes, page_size: int = 4000, source: str = "test") -> Process:
    """Return a process with one content, as fd:1."""
    made = process(page_size)
    data = text.encode() if isinstance(text, str) else text
    made.add(made.shared.store.put(data), source)
    return made


def answer_of(asked: Process, name: str, /, *args: object, **kwargs: object) -> bytes:
    """Do a call to its end, in a Trio of its own; return its answer."""
    return trio.run(partial(asked.call, name, *args, **kwargs))


def ask(asked: Process, name: str, /, *args: object, **kwargs: object) -> ET.Element:
    """Do a call as ``answer_of``; return its answer, parsed."""
    return ET.fromstring(answer_of(asked, name, *args, **kwargs))


async def asking(
    asked: Process, name: str, /, *args: object, **kwargs: object
) -> ET.Element:
    """Do a call; return its answer, parsed."""
    return ET.fromstring(await asked.call(name, *args, **kwargs))


def text_of(element: ET.Element | None) -> str:
    """Return a text without the two LFs that are not of it."""
    assert element is not None
    text = element.text or ""
    assert text[:1] == text[-1:] == "\n", element.attrib
    return text[1:-1]


def failed(element: ET.Element) -> tuple[str, str, str]:
    """Return type, fd and message of an error."""
    assert element.tag == "fd_error", ET.tostring(element)
    return (
        element.get("type", ""),
        element.get("fd", ""),
        element.findtext("message", ""),
    )
