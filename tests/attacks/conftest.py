"""What the attacks get: a real host, and the leak check for every test."""

from tests.helpers.figures import tell
from tests.helpers.hosts import stage

__all__ = ["stage", "tell"]
