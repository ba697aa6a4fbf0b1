"""What the tests of the command line get: commands that are forked, as in `tests/system/e2e`.

What a start imports is asked of commands that are started (`test_app.py`).
"""

from tests.helpers.command import commands_are_forked

__all__ = ["commands_are_forked"]
