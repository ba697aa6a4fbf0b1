"""Fixtures of the command line's tests.

Commands that are forked, as in `tests/system/e2e`.

The imports of a start are asked of commands that are started (`test_app.py`).
"""

from tests.helpers.command import commands_are_forked

__all__ = ["commands_are_forked"]
