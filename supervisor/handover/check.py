"""The command ``handover-check``: a host asks its next program whether it can be that.

It is started as a process of its own, with the words that the next program will get, so
it finds what that would find: its own modules, and the configuration with the files and
directories that this names. When a next program cannot begin, the children of the one
before die with it.
"""

from __future__ import annotations

import os

import supervisor.daemon.serve  # noqa: F401 - what the next program imports has to be there
from supervisor.config.daemon_checks import faults_of_places
from supervisor.config.directories import VARIABLE, places_from, places_of
from supervisor.config.loader import ConfigError, load_config
from supervisor.handover.exchange import REFUSAL, answer_check


def check(argv: list[str]) -> int:
    """Answer on stdout; return the exit status, 0 if it can.

    Args:
        argv: the versions that are to be taken over, then the words of the command line.
    """
    path = _config_of(argv[1:])
    if path is not None:
        try:
            config = load_config(path)
            # Of what it says itself as well: the next program begins with that.
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
    """Return what ``--config`` names."""
    for number, word in enumerate(words):
        if word == "--config":
            return words[number + 1] if number + 1 < len(words) else None
        if word.startswith("--config="):
            return word.removeprefix("--config=")
    return None
