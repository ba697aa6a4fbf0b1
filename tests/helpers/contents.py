"""LLM fds without a host: a process of a model, and what its answers say."""

from xml.etree import ElementTree as ET

import trio

from supervisor.llmfd import TOOLS, ContentSettings, Process, Shared, Store


def process(page_size: int = 4000, **settings: object) -> Process:
    """Return a process with an empty table and a store of its own."""
    chosen = ContentSettings(page_size=page_size, **settings)  # type: ignore[arg-type]
    return Process(Shared(Store(), TOOLS, settings=chosen))


def holding(text: str | bytes, page_size: int = 4000, source: str = "test") -> Process:
    """Return a process with one content, as fd:1."""
    made = process(page_size)
    data = text.encode() if isinstance(text, str) else text
    made.add(made.shared.store.put(data), source)
    return made


def ask(asked: Process, name: str, /, *args: object, **kwargs: object) -> ET.Element:
    """Do a call that awaits nothing; return its answer, parsed."""
    return ET.fromstring(asked.call_now(name, *args, **kwargs))


async def asking(
    asked: Process, name: str, /, *args: object, **kwargs: object
) -> ET.Element:
    """Do a call; return its answer, parsed."""
    return ET.fromstring(await asked.call(name, *args, **kwargs))


def waiting(
    asked: Process, name: str, /, *args: object, **kwargs: object
) -> ET.Element:
    """Do a call to its end, in a Trio of its own; return its answer, parsed."""

    async def do() -> ET.Element:
        return await asking(asked, name, *args, **kwargs)

    return trio.run(do)


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
