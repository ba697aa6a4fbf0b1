"""Fixtures of the tests from outside.

Commands that are forked, not started (`forkserver`).

Started as it is installed is each command that is looked at while it runs, that a shell or
another program starts, or that needs more than words, directory and environment.
"""

from tests.helpers.command import commands_are_forked

__all__ = ["commands_are_forked"]
