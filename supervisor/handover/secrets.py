"""The key of the model, where it came by the environment, on its way to the next program.

It was wiped from the environment when it was read, so the next program would not find
it.  It travels in the state, which is in memory of this process only, and is put back
right before it is looked for: ``/proc/PID/environ`` never shows it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from supervisor.handover.state import HostState

KEY = "environment_key"
"""Where it stands in the state of the service; absent if a file has it."""

_VARIABLE = "OPENAI_API_KEY"


def give_key_back(state: HostState | None) -> None:
    """Put the key where the service looks for it; nothing if none was handed over."""
    left = None if state is None else state.services.get("llm")
    if isinstance(left, dict) and isinstance(left.get(KEY), str):
        os.environ[_VARIABLE] = left[KEY]
