"""Fixtures of a replaced program's tests.

A first program that is forked (`forkserver`).

The next one is started by the first, as everywhere.
"""

from tests.helpers.command import commands_are_forked

__all__ = ["commands_are_forked"]
