"""``[tools]`` and ``[file_descriptor]``: LLM fds of a child's model.

LLM fds are on if one of their tools is listed in ``[tools] enabled``, or with
``[file_descriptor] enabled = true``; the latter without any tool is an error: a model
would get descriptors that it cannot read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hostlib.user_values import OptionError, check_value, parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.llmfd.opening import FdOptions

PROCESS_TOOLS = ("fork", "spawn")
"""Tools of the tool loop that use descriptors but do not turn them on."""

FD_TOOLS = (
    *("read_fd", "fd_to_file", "search_fd", "rename_fd"),
    *("mark_fd_section", "get_fd_section", "list_fd_sections", "delete_fd_section"),
    *("create_temp_file", "read_temp_file", "write_temp_file", "delete_temp_file"),
    *("checkpoint_process", "restore_process", "list_checkpoints"),
    "delete_checkpoint",
    "summarize_fd",
)
"""Tools that ``[tools] enabled`` may list."""

NEED_MODEL = (*PROCESS_TOOLS, "summarize_fd")
"""Tools that call a model."""

MOST_CHECKPOINTS = 1000
"""As in ``supervisor.llmfd.checkpoints``, which is loaded only where LLM fds are on."""

NEED_NO_LISTING = (
    *("wrap_output", "wrap_input", "fd_info", "list_fds", "keep_fds", "tool_schemas"),
)


class ToolsSection(msgspec.Struct, forbid_unknown_fields=True):
    """``[tools]``."""

    enabled: list[str] = []


class FileDescriptorSection(msgspec.Struct, forbid_unknown_fields=True):
    """``[file_descriptor]``."""

    enabled: bool | None = None
    max_direct_output_chars: int = 8000
    default_page_size: int = 4000
    max_input_chars: int = 8000
    page_user_input: bool = True
    conversation_fds: bool = False
    auto_summarize: bool = False
    max_memory: str = "256M"
    max_store: str = "4G"
    keep_checkpoints: int = 0
    keep_checkpoints_for: str = ""
    escape: str = "xml"


def fd_options(
    tools: ToolsSection | None, section: FileDescriptorSection | None
) -> FdOptions:
    """Return what checked sections set.

    Args:
        tools: None: every tool is offered.
        section: None: the usual sizes.
    """
    from supervisor.llmfd import ContentSettings, Retention  # noqa: PLC0415 - with LLM fds
    from supervisor.llmfd.opening import FdOptions  # noqa: PLC0415 - as above

    section = section or FileDescriptorSection()
    return FdOptions(
        tools=None if tools is None else frozenset(tools.enabled),
        settings=ContentSettings(
            page_size=section.default_page_size,
            max_output=section.max_direct_output_chars,
            max_input=section.max_input_chars,
            page_input=section.page_user_input,
            conversation_fds=section.conversation_fds,
            auto_summarize=section.auto_summarize,
            raw=section.escape == "raw",
        ),
        max_memory_bytes=parse_size(section.max_memory),
        max_store_bytes=parse_size(section.max_store),
        retention=Retention(
            section.keep_checkpoints,
            parse_duration(section.keep_checkpoints_for or "0"),
        ),
    )


def is_enabled(tools: ToolsSection, section: FileDescriptorSection | None) -> bool:
    """Return whether a host has LLM fds."""
    return _lists_any(tools) or bool(section is not None and section.enabled)


def _lists_any(tools: ToolsSection) -> bool:
    return any(name in FD_TOOLS for name in tools.enabled)


def check_file_descriptor(
    section: FileDescriptorSection,
) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each value that cannot be used."""
    for name in ("max_direct_output_chars", "default_page_size", "max_input_chars"):
        if getattr(section, name) < 1:
            yield name, "at least 1"
    for name in ("max_memory", "max_store"):
        yield from check_value(name, _room, getattr(section, name), OptionError)
    yield from _check_retention(section)
    if section.escape not in ("xml", "raw"):
        yield "escape", "xml or raw"


def _check_retention(section: FileDescriptorSection) -> Iterator[tuple[str, str]]:
    if not 0 <= section.keep_checkpoints <= MOST_CHECKPOINTS:
        yield "keep_checkpoints", f"0 (all) to {MOST_CHECKPOINTS}"
    kept_for = section.keep_checkpoints_for or "0"
    yield from check_value(
        "keep_checkpoints_for", parse_duration, kept_for, OptionError
    )


def _room(text: str) -> None:
    if parse_size(text) < 1:
        raise OptionError("more than 0")


def check_tools(
    tools: ToolsSection, section: FileDescriptorSection | None
) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of contradictions between the two sections."""
    if section is not None and section.enabled and not _lists_any(tools):
        text = "true, but [tools] enabled lists none of its tools; list read_fd"
        yield "file_descriptor.enabled", text


def odd_fds(
    tools: ToolsSection, section: FileDescriptorSection | None, *, has_model: bool
) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of probable mistakes."""
    yield from _odd_tools(tools, has_model=has_model)
    if section is None:
        return
    if not _lists_any(tools):
        if not section.enabled:
            text = "is there, but [tools] enabled lists none of its tools: it is off"
            yield "file_descriptor", text
        return
    if section.enabled is False:
        text = "false changes nothing while [tools] enabled lists one of its tools"
        yield "file_descriptor.enabled", text
    for key in ("max_direct_output_chars", "max_input_chars"):
        if getattr(section, key) < section.default_page_size:
            text = "less than default_page_size: one page would hold what is stored"
            yield f"file_descriptor.{key}", text


def _odd_tools(tools: ToolsSection, *, has_model: bool) -> Iterator[tuple[str, str]]:
    known = {*FD_TOOLS, *PROCESS_TOOLS, *NEED_NO_LISTING}
    for name in tools.enabled:
        if name not in known:
            yield "tools.enabled", f"{name!r} is no tool of this host"
        elif name in NEED_MODEL and not has_model:
            text = f"{name!r} needs a model, and there is no [llm] section"
            yield "tools.enabled", text
