"""Fixtures of the MCP server's tests: hosts and other commands that are forked.

The server itself is started, by its client or by `command.running`.
"""

from tests.helpers.command import commands_are_forked

__all__ = ["commands_are_forked"]
