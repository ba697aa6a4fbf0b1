"""Large content as handles for language models ("LLM fds").

A store of immutable contents, tables of descriptors, and the calls on them. A
``Process`` is what one model sees:

    store = Store()
    process = Process(ProcessParts(store, TOOLS))
    process.add(store.put(log), "tool:read_log")
    answer = await process.call("read_fd", fd="fd:1", page=2)

An ``LlmFd`` is not an open file: another type, another table, another word. Read on in
``docs/reference/llm-fds.md``.

Public: ``gateway``, ``opening``.
"""

from supervisor.llmfd.allowance import Allowance
from supervisor.llmfd.arguments import Json, Param, Tool, chat_schema, parameters_schema
from supervisor.llmfd.blob import Content
from supervisor.llmfd.calls.tools import TOOLS
from supervisor.llmfd.checkpoints import Checkpoints, Retention
from supervisor.llmfd.client_files import ClientFiles, Files
from supervisor.llmfd.errors import FdError
from supervisor.llmfd.process import (
    FOR_PROGRAMS,
    ContentSettings,
    Process,
    ProcessParts,
    Summarizer,
    UnknownCallError,
)
from supervisor.llmfd.store import Store
from supervisor.llmfd.table import FdTable, LlmFd
from supervisor.llmfd.tempfiles import TempFiles

__all__ = [
    "FOR_PROGRAMS",
    "TOOLS",
    "Allowance",
    "Checkpoints",
    "ClientFiles",
    "Content",
    "ContentSettings",
    "FdError",
    "FdTable",
    "Files",
    "Json",
    "LlmFd",
    "Param",
    "Process",
    "ProcessParts",
    "Retention",
    "Store",
    "Summarizer",
    "TempFiles",
    "Tool",
    "UnknownCallError",
    "chat_schema",
    "parameters_schema",
]
