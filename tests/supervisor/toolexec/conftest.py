"""Fixtures of ToolExec's tests.

A host that runs tools, and commands that are forked.
"""

from tests.helpers.command import commands_are_forked
from tests.helpers.toolscene import scene

__all__ = ["commands_are_forked", "scene"]
