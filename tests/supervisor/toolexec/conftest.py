"""What the tests of ToolExec get: a host that runs tools."""

from tests.helpers.toolscene import scene

__all__ = ["scene"]
