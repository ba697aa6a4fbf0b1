"""Large content as handles for language models ("LLM fds").

A store of immutable contents, tables of descriptors, and the calls on them. A
``Process`` is what one model sees:

    store = Store()
    process = Process(Shared(store, TOOLS))
    process.add(store.put(log), "tool:read_log")
    answer = await process.call("read_fd", fd="fd:1", page=2)

An ``LlmFd`` is not an open file: another type, another table, another word. Read on in
``docs/llm-fds.md``.
"""

from vfs.content.allowance import Allowance
from vfs.content.arguments import Json, Param, Tool, chat_schema, parameters_schema
from vfs.content.blob import Content
from vfs.content.checkpoints import Checkpoints, Retention
from vfs.content.errors import FdError
from vfs.content.files import ClientFiles, Files
from vfs.content.process import (
    FOR_PROGRAMS,
    Process,
    Settings,
    Shared,
    Summarizer,
    UnknownCallError,
)
from vfs.content.store import Store
from vfs.content.table import FdTable, LlmFd
from vfs.content.tempfiles import TempFiles
from vfs.content.tools import TOOLS

__all__ = [
    "FOR_PROGRAMS",
    "TOOLS",
    "Allowance",
    "Checkpoints",
    "ClientFiles",
    "Content",
    "FdError",
    "FdTable",
    "Files",
    "Json",
    "LlmFd",
    "Param",
    "Process",
    "Retention",
    "Settings",
    "Shared",
    "Store",
    "Summarizer",
    "TempFiles",
    "Tool",
    "UnknownCallError",
    "chat_schema",
    "parameters_schema",
]
