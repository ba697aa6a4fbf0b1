"""The command ``handover-check``: tests whether a program can take a host over.

A host runs it as a process of its own, with the words of the next program: the same
modules, configuration, files and directories are found. When a next program cannot
begin, the children of the one before die with it.
"""

from __future__ import annotations

import os

import supervisor.daemon.serve  # noqa: F401 - a missing module must fail here
from supervisor.config.daemon_checks import faults_of_places
from supervisor.config.directories import VARIABLE, places_from, places_of
from supervisor.config.loader import ConfigError, load_config
from supervisor.handover.exchange import REFUSAL, answer_check


def check(argv: list[str]) -> int:
    """Print the answer on stdout; return the exit status, 0 if it can take over.

    Args:
        argv: the versions to take over, then the words of the command line.
    """
    path = _config_of(argv[1:])
    if path is not None:
        try:
            config = load_config(path)
            # Its own messages included: the next program begins with these lines.
            own = places_of(config.host, None)
        except ConfigError as why:
            return _refuse(f"its configuration has faults: {why}")
        except OSError as why:
            return _refuse(f"its configuration cannot be used: {why.strerror}")
        places = places_from(os.environ.get(VARIABLE)) or own
        if faults := faults_of_places(places, config):
            return _refuse(f"its configuration has faults: {ConfigError(path, faults)}")
    return answer_check()


def _refuse(text: str) -> int:
    line = " ".join(f"{REFUSAL}{text}".split())
    os.write(1, line.encode(errors="replace") + b"\n")
    return 2


def _config_of(words: list[str]) -> str | None:
    """Return the argument of ``--config``."""
    for number, word in enumerate(words):
        if word == "--config":
            return words[number + 1] if number + 1 < len(words) else None
        if word.startswith("--config="):
            return word.removeprefix("--config=")
    return None
