"""How long chaos lasts: `CHAOS_ROUNDS`, 1,000 in the short form, 10,000 in the long."""

import os

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "1000"))
"""Rounds of random kill -9 of children."""

LONG = ROUNDS >= 10_000
"""Whether this is the long form."""

HOST_KILLS = 200 if LONG else 10
"""Rounds of random kill -9 of the host."""

SEED = int(os.environ.get("CHAOS_SEED", "0")) or None
"""What the choices are drawn from; a failing run prints its own, to be run again."""

SERVE_KILLS = 200 if LONG else 8
"""Rounds of random kill -9 of the daemon."""
