"""Runs real agents, as their registries have them, and says what came of each.

    python -m tests.agents [--into DIR] [--newest] [--short] [--native] [--direct] [--as-nobody] [AGENT...]

Each is installed beneath DIR (a temporary directory if none is named), in the version of
its recipe or with ``--newest`` in the newest, and started once by ``sandhost run --recipe AGENT --workspace`` in the default sandbox, unmodified. A
stand-in takes the model's place (`demo/provider`) and leads it through the steps of
`table.py`. It is a provider of Chat, to which the host translates; with ``--native`` one
of all three APIs. With ``--direct`` an agent runs without a host and asks the stand-in
itself: that shows whether the two fit. With ``--refused`` all calls but the first are refused, as beyond a quota,
and what counts is that the agent gives up within a minute. Started by root, hosts are root's;
with ``--as-nobody`` they are an ordinary user's. It needs the network, to install.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from supervisor.llm.recipe import read_recipe
from tests.agents.installing import install
from tests.agents.table import AGENTS, ALL, smallest
from tests.agents.trial import Form, Host, Trial, last_line, run_trial, shown


def main() -> int:
    """Try the agents; return 1 if one that was installed did not pass."""
    parser = argparse.ArgumentParser(prog="python -m tests.agents")
    parser.add_argument("--into", type=Path, default=None)
    parser.add_argument("--newest", action="store_true")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--refused", action="store_true")
    parser.add_argument("--as-nobody", action="store_true")
    parser.add_argument("agents", nargs="*", metavar="AGENT")
    given = parser.parse_args()
    wanted = set(given.agents) | set(smallest() if given.short else ())
    unknown = wanted - {agent.name for agent in AGENTS}
    if unknown:
        parser.error(f"cannot try {', '.join(sorted(unknown))}: it is not in the table")
    chosen = [one for one in AGENTS if one.name in wanted or not wanted]
    with tempfile.TemporaryDirectory(prefix="agents-") as name:
        os.chmod(name, 0o755)
        into = (given.into or Path(name) / "installed").absolute()
        host = _nobodys_host(Path(name) / "nobody") if given.as_nobody else Host()
        trials = [
            _try(Trial(one, one.passes, host), into, Path(name), given)
            for one in chosen
        ]
    names = shown(trials[0].columns if trials else ALL)
    head = " | ".join(["agent", "version", *names, "time", "reason"])
    sys.stdout.write("\n".join([head, *(trial.row() for trial in trials), ""]))
    return int(any(not one.is_whole and one.version != "-" for one in trials))


def _nobodys_host(where: Path) -> Host:
    """Return a host of an ordinary user's, with an installation that it may enter."""
    from tests.system.attacks.test_unprivileged import NOBODY, nobodys_command  # noqa: PLC0415

    where.mkdir()
    words, _ = nobodys_command(where)
    python = Path(words[-1])
    path = os.pathsep.join((str(python.parent), os.environ["PATH"]))
    return Host((*words, "-m", "supervisor"), path, str(python.resolve()), NOBODY)


def _try(trial: Trial, into: Path, scratch: Path, given: argparse.Namespace) -> Trial:
    recipe = read_recipe(trial.agent.name)
    version = "" if given.newest else recipe.version_tried
    try:
        program, trial.version = install(
            trial.agent, recipe, into, version=version, python=trial.host.python
        )
    except (OSError, subprocess.SubprocessError) as why:
        trial.reason = f"not installed: {last_line(str(why))}"
        return trial
    form = Form(given.direct, given.native, given.refused)
    run_trial(trial, recipe, program, scratch, form)
    sys.stderr.write(f"{trial.row()}\n")
    return trial


if __name__ == "__main__":
    sys.exit(main())
