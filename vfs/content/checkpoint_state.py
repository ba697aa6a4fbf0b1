"""What a checkpoint holds of a process, as values of JSON, and the way back.

Contents are named by the hash of what was put in: the base64 of binary content is made
again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfs.content.table import FdNumber, FdTable, LlmFd

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfs.content.arguments import Json
    from vfs.content.blob import Content
    from vfs.content.process import Process
    from vfs.content.store import Store


def state_of(process: Process) -> dict[str, object]:
    """Return the conversation and the descriptors of a process."""
    return {
        "next": process.table.next_number,
        "messages": process.messages,
        "program": process.program,
        "fds": [
            {
                "number": fd.number,
                "key": fd.content.original.key.hex(),
                "page_size": fd.page_size,
                "source": fd.source,
                "created": fd.created,
                "name": fd.name,
                "sections": fd.sections,
            }
            for fd in process.table.fds.values()
        ],
    }


def table_of(
    store: Store, document: dict[str, Json], read: Callable[[str], Content]
) -> FdTable:
    """Return the descriptors of a state, their contents held.

    Args:
        store: keeps the contents.
        document: from ``state_of``.
        read: returns the content of a key, held once; what it raises is raised.
    """
    table = FdTable(store)
    contents: dict[str, Content] = {}
    try:
        for row in document["fds"]:  # type: ignore[union-attr]
            _enter(table, store, row, contents, read)  # type: ignore[arg-type]
    except BaseException:
        table.close()
        raise
    finally:
        for content in contents.values():
            store.drop(content)
    table.next_number = document["next"]  # type: ignore[assignment]
    return table


def _enter(
    table: FdTable,
    store: Store,
    row: dict[str, Json],
    contents: dict[str, Content],
    read: Callable[[str], Content],
) -> None:
    key = str(row["key"])
    content = contents.get(key)
    if content is None:
        content = contents[key] = read(key)
    page_size = int(str(row["page_size"]))
    content.text.pages(page_size)
    sections: dict[str, list[int]] = row["sections"]  # type: ignore[assignment]
    table.enter(
        LlmFd(
            FdNumber(int(str(row["number"]))),
            store.hold(content),
            page_size,
            str(row["source"]),
            float(str(row["created"])),
            str(row["name"]),
            {ref: (first, last) for ref, (first, last) in sections.items()},
        )
    )
