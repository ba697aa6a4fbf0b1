"""Figures, their aims, and how both are printed and saved.

A `Report` is one program's result: a table for people, then one line of JSON for
programs. A figure that could not be taken is a row too, with the reason: it counts as a
fault, never as a pass. One beside a program that is not on the machine is no fault. Not concerned with how a figure is taken (`benchmarks.measure`).
"""

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound that a figure should keep."""

    limit: float
    at_least: bool

    def is_met(self, value: float) -> bool:
        """Tell whether the value keeps the bound; the bound itself does."""
        return value >= self.limit if self.at_least else value <= self.limit

    def text(self) -> str:
        """Return the bound as the table prints it, such as ">= 0.75"."""
        return f"{'>=' if self.at_least else '<='} {self.limit:g}"


def at_least(limit: float) -> Aim:
    """Return the aim of a figure that should be large."""
    return Aim(limit, at_least=True)


def at_most(limit: float) -> Aim:
    """Return the aim of a figure that should be small."""
    return Aim(limit, at_least=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: `value` in `unit`, or None and the reason in `detail`.

    Attributes:
        is_absent: without a value, for a program is not on this machine, or it was not asked.
    """

    name: str
    value: float | None
    unit: str
    aim: Aim | None = None
    detail: str = ""
    data: Mapping[str, float] = field(default_factory=dict)
    is_absent: bool = False

    @property
    def verdict(self) -> str:
        """One of "reached", "not reached", "not measured", "absent", or "" (no aim)."""
        if self.value is None:
            return "absent" if self.is_absent else "not measured"
        if self.aim is None:
            return ""
        return "reached" if self.aim.is_met(self.value) else "not reached"

    def cells(self) -> tuple[str, ...]:
        """Return the columns of the table."""
        value = "-" if self.value is None else f"{self.value:,.3f}".rstrip("0")
        aim = self.aim.text() if self.aim else ""
        unit = self.unit
        return (self.name, value.rstrip("."), unit, aim, self.verdict, self.detail)

    def as_json(self) -> dict[str, object]:
        """Return the row with every number behind it."""
        return {
            "name": self.name,
            "value": self.value if self.value is None else round(self.value, 4),
            "unit": self.unit,
            "aim": self.aim.text() if self.aim else None,
            "verdict": self.verdict,
            "detail": self.detail,
            "data": {key: round(number, 4) for key, number in self.data.items()},
        }


@dataclass(frozen=True, slots=True)
class Report:
    """One program's figures, and the method in one sentence."""

    name: str
    method: str
    rounds: int
    rows: Sequence[Row]

    def table(self) -> str:
        """Return the figures as aligned columns under the method."""
        head = ("measure", "value", "unit", "aim", "verdict", "detail")
        lines = [head, *(row.cells() for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        rounds = f"{self.rounds} round{'s' if self.rounds > 1 else ''}"
        text = [f"{self.name}: {self.method}, {rounds}"]
        for line in lines:
            cells = [
                cell.rjust(width) if i == 1 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            text.append("  ".join(cells).rstrip())
        return "\n".join(text)

    def as_json(self) -> dict[str, object]:
        """Return the report, with what must be known to compare it with another."""
        return {
            "benchmark": self.name,
            "method": self.method,
            "rounds": self.rounds,
            "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "rows": [row.as_json() for row in self.rows],
        }

    def publish(self, *, save: bool, strict: bool) -> int:
        """Print the table and the JSON, and return the exit status.

        Args:
            save: also write `results/NAME.json`, unless a figure is missing.
            strict: an aim that is not reached is a fault.

        Returns:
            0, or 1 if a figure could not be taken or, if strict, an aim was missed.
        """
        print(self.table())
        print(json.dumps(self.as_json()), flush=True)
        verdicts = {row.verdict for row in self.rows}
        if "not measured" in verdicts:
            if save:
                print(f"{self.name}: not saved, figures are missing", file=sys.stderr)
            return 1
        if save:
            RESULTS.mkdir(exist_ok=True)
            text = json.dumps(self.as_json(), indent=2) + "\n"
            (RESULTS / f"{self.name}.json").write_text(text, encoding="utf-8")
        return int(strict and "not reached" in verdicts)


def machine() -> dict[str, object]:
    """Return what a figure depends on and a reader cannot see from it."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": _interpreter(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _interpreter() -> str:
    """Return the interpreter's version, and whether its own calls go by a table.

    Where libpython is a shared object most of them do, which costs a tenth.
    """
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    kind = "shared" if "/libpython3" in maps else "static"
    return f"{platform.python_version()}, {kind} libpython"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
