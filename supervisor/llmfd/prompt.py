"""The block about LLM fds in the system prompt of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

INSTRUCTIONS = """\
<file_descriptor_instructions>
This system includes a file descriptor feature for handling large content:

1. Large outputs are stored in file descriptors (fd:12345)
2. Use read_fd to access content in pages or all at once
3. Use fd_to_file to export content to files

Key commands:
- read_fd(fd="fd:12345", page=2) - Read page 2
- read_fd(fd="fd:12345", read_all=True) - Read entire content
- fd_to_file(fd="fd:12345", file_path="output.txt") - Write to file

Tips:
- Check "truncated" and "continued" attributes for content continuation
- When analyzing large content, consider reading all pages first
- For very large content, consider using fork to delegate analysis
</file_descriptor_instructions>"""
"""The block, as the design of LLM fds words it."""

_TAG = INSTRUCTIONS.partition("\n")[0]


def instructions(enabled: Collection[str] | None) -> str:
    """Return the block for a model with these tools; None for all.

    Without ``fd_to_file`` the lines about it are left out.
    """
    if enabled is None or "fd_to_file" in enabled:
        return INSTRUCTIONS
    lines = INSTRUCTIONS.split("\n")
    return "\n".join(line for line in lines if "fd_to_file" not in line)


def enrich(system: str, enabled: Collection[str] | None, preloads: str = "") -> str:
    """Return a system prompt with the block, once, and preloads."""
    parts = [system]
    if _TAG not in system:
        parts.append(instructions(enabled))
    if preloads:
        parts.append(preloads)
    return "\n\n".join(part for part in parts if part)
