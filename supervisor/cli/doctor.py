"""``sandhost doctor``: the features of this machine, and leftovers of hosts.

The two reports, as text and JSON, and their exit status.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import click

from hostlib.messages import UsageFault, print_text, printable
from hostlib.unix_names import is_deaf
from supervisor.cli import doctor_layers, doctor_workspaces
from supervisor.cli.help import Command
from supervisor.cli.options import as_json as json_option
from supervisor.cli.options import control as control_option
from supervisor.control.client import ControlError, call, control_path
from supervisor.doctor.leftovers import find_leftovers
from supervisor.observe.tables import WIDTH, to_json
from supervisor.sandbox.probes import MISSING, Finding, probe_machine

if TYPE_CHECKING:
    from collections.abc import Sequence

CLEAN = 0
FOUND = 1
CANNOT_ASK = 2
"""Exit statuses of the command; the last one comes with a ``ControlError``."""

_WALLS = (
    "What a child runs in here (profile auto), as one said that was started for this:"
)
_NO_WALLS = "No child could be started under profile auto:"

_HEADS = {
    "descriptors": "descriptors of the host that nothing explains",
    "rows": "rows of tables that nothing stands behind",
    "processes": "processes beneath the host that no living child explains",
    "zombies": "processes that ended and were not waited for",
    "launchpads": "launchpads whose host is gone",
    "orphans": "processes of children whose launchpad is gone",
    "scratch": "scratch directories that no living host holds",
    "sockets": "control sockets that nobody listens on",
    "staged": "names of files that were being published",
    "workspaces": "things of workspaces that a crash has left",
}
"""The titles of the lists, by key in the reports."""


@click.command(
    cls=Command, epilog="Example: sandhost doctor --leaks --control run.sock"
)
@click.option("--leaks", is_flag=True, help="A host's tables against /proc.")
@control_option
@json_option
def doctor(control: str | None, *, leaks: bool, as_json: bool) -> int:
    """Tell what this machine gives, or lacks.

    With --leaks: what hosts have left behind on it.

    Exit status: 0 nothing found, 1 something found, 2 cannot ask.
    """
    if control is not None and not leaks:
        raise UsageFault("--control names a host for --leaks; add it")
    if leaks:
        text, status = find_leaks(control, as_text=not as_json)
    else:
        text, status = examine_machine(as_text=not as_json)
    print_text(text)
    return status


def examine_machine(*, as_text: bool = True) -> tuple[str, int]:
    """Probe the machine (``doctor``); start a child to see its walls.

    Args:
        as_text: text for people, else JSON.

    Returns:
        The report, and ``CLEAN``, or ``FOUND`` if no host works here: a feature is
            missing, or no child could be started.
    """
    findings = probe_machine()
    lacking = [f.what for f in findings if f.is_needed and f.state == MISSING]
    if lacking:  # a launchpad could not begin or end
        walls, why = None, f"not tried without {', '.join(lacking)}"
    else:
        walls, why = doctor_layers.try_layers()
    if why:
        modes = doctor_workspaces.missing_modes(f"no child can be started: {why}")
    else:
        modes = doctor_workspaces.try_modes()
    layers = doctor_layers.rows(walls, why)
    status = FOUND if why else CLEAN
    if as_text:
        head = f"{_NO_WALLS} {why}" if why else _WALLS
        text = machine_text(findings) + layers_text(head, layers)
        return text + modes_text(modes), status
    report = {
        "isolation": walls.row() if walls is not None else None,
        "layers": layers,
        "probes": [finding.row() for finding in findings],
        "workspaces": modes,
    }
    return to_json(report), status


def machine_text(findings: Sequence[Finding]) -> str:
    """Return the findings as a text for people, ``WIDTH`` columns wide."""
    lines = []
    column = max(len(finding.what) for finding in findings) + 2
    for finding in findings:
        texts = (
            f"{finding.state}: {finding.detail}",
            f"tried: {finding.probed}",
            f"without it: {finding.without}",
        )
        head = finding.what.ljust(column)
        for text in texts:
            wrapped = textwrap.wrap(
                printable(text),
                WIDTH,
                initial_indent=head,
                subsequent_indent=" " * (column + 2),
            )
            lines += wrapped
            head = " " * column
    return "\n".join(lines) + "\n"


def layers_text(head: str, layers: Sequence[dict[str, str]]) -> str:
    """Return the table of layers as a text for people."""
    lines = ["", *textwrap.wrap(printable(head), WIDTH)]
    for row in layers:
        text = f"{row['layer']:<14}{row['state']}: {row['detail']}"
        if row["state"] not in {doctor_layers.PRESENT, doctor_layers.NOT_NEEDED}:
            text += f" (takes {row['takes']})"
        indent = " " * 16
        lines += textwrap.wrap(printable(text), WIDTH, subsequent_indent=indent)
    return "\n".join(lines) + "\n"


def modes_text(modes: Sequence[dict[str, str]]) -> str:
    """Return the modes of workspaces as a text for people."""
    lines = ["", "Workspaces (run --workspace DIR:MODE), as each was tried:"]
    for row in modes:
        text = f"{row['mode']:<14}{row['state']}: {row['detail']}"
        lines += textwrap.wrap(printable(text), WIDTH, subsequent_indent=" " * 16)
    return "\n".join(lines) + "\n"


def find_leaks(
    control: str | None, *, as_text: bool = True, tmp: str | None = None
) -> tuple[str, int]:
    """Look for leaks (``doctor --leaks``): in a host that answers, else around.

    Args:
        control: the option; None finds a host by the environment, and looks for
            leftovers of dead hosts if there is none.
        as_text: text for people, else JSON.
        tmp: has scratch directories; None for the system's directory.

    Returns:
        The report, and ``CLEAN`` or ``FOUND``.

    Raises:
        ControlError: the named host cannot be asked (``CANNOT_ASK``).
    """
    path = control_path(control)
    if path is not None and (control is not None or not is_deaf(path)):
        report = call(path, "leaks")
        if not isinstance(report, dict):
            raise ControlError(
                f"cannot ask {path!r} for leaks: its answer is no report; name the"
                " socket of a host (--control)"
            )
        head = f"host {report.get('pid')}, asked at {path!r}"
    else:
        report = find_leftovers(tmp)
        head = "no host was asked; this is what dead ones left"
    status = CLEAN if report.get("clean") is True else FOUND
    return leaks_text(head, report) if as_text else to_json(report), status


def leaks_text(head: str, report: dict[str, Any]) -> str:
    """Return a report of leaks as a text for people: one line for each finding."""
    lines = [f"{head}:"]
    for kind, meaning in _HEADS.items():
        rows = report.get(kind) or []
        if rows:
            lines.append(f"{len(rows)} {meaning}:")
            lines += [f"  {_fields(row)}" for row in rows]
    if report.get("clean") is True:
        lines.append("nothing found")
    lines += [f"unknown: {text}" for text in report.get("unknown") or []]
    if not report.get("staged_search_complete", True):
        lines.append("unknown: not all directories were searched for staged names")
    explained = report.get("explained")
    if explained:
        lines.append(
            "explained descriptors: " + _fields(dict(sorted(explained.items())))
        )
    return "\n".join(map(printable, lines)) + "\n"


def _fields(row: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in row.items())
