"""When the key of the hosts is looked for.

At the end of each test, and of all tests.

A test fails if at its end the key is in its directory, in what was captured of it, in what
its helpers were told, or in what a child saw or had. At the end of all of them the figures
are printed; and if hosts held the key but nothing was looked through, the run fails, for
then nothing was proved.

Hooks of pytest, registered by `tests/conftest.py`; with pytest-xdist each worker has
its own key and account, and the figures are added up.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.canary import ACCOUNT, FORMS, search, told

WATCHER = Path(__file__).parent / "children" / "watcher.py"

ENOUGH_HOSTS = 20
"""A few tests may have hosts and nothing else; so many have children and files as well."""

PLACES = ("children", "texts", "files", "bytes")
"""Where nothing at all is no proof."""


class Watch:
    """The watcher's process; see `children/watcher.py`.

    It is nobody's child, so that no test takes it for something that was left.

    Args:
        forms: of the key, for which it looks.
        options: of the program.

    Attributes:
        how: its first line: `watching events`, or `watching walks`.
        last: its finds between the last question and its end.

    Raises:
        EOFError: it has ended, now or when it is asked.
    """

    def __init__(self, forms: tuple[bytes, ...] = FORMS, *options: str) -> None:
        ours, self._order = os.pipe2(os.O_CLOEXEC)
        self._heard, said = os.pipe2(os.O_CLOEXEC)
        command = [sys.executable, "-I", "-S", str(WATCHER), *options]
        # Ends at once: what it forked goes on.
        subprocess.run(command, stdin=ours, stdout=said, env={}, cwd="/", check=True)
        os.close(ours)
        os.close(said)
        order = {"pid": os.getpid(), "forms": [form.hex() for form in forms]}
        os.write(self._order, json.dumps(order).encode() + b"\n")
        self._rest = b""
        self.last: list[str] = []
        self.how = ""
        while not self.how:
            self.how = str(next(self._lines(), ""))
        os.set_blocking(self._heard, False)

    def hits(self) -> list[str]:
        """Return what it has found since this was last asked."""
        return [f"in a child: {line}" for line in self._lines()]

    def end(self) -> Counter[str]:
        """End it; return its figures."""
        os.close(self._order)
        os.set_blocking(self._heard, True)
        found: list[Any] = []
        while not (found and isinstance(found[-1], dict)):
            found += self._lines()
        os.close(self._heard)
        self.last = [f"in a child: {line}" for line in found[:-1]]
        return Counter(found[-1])

    def _lines(self) -> Iterator[Any]:
        with suppress(BlockingIOError):
            data = os.read(self._heard, 65_536)
            if not data:
                raise EOFError("who watches the children of tests has ended")
            self._rest += data
        *whole, self._rest = self._rest.split(b"\n")
        yield from map(json.loads, whole)


class CanaryPlugin:
    """The hooks."""

    def __init__(self) -> None:
        self._watch: Watch | None = None
        self._seen: set[Path] = set()
        self._figures: Counter[str] = Counter()
        self._how: set[str] = set()
        self._hits: list[str] = []
        self._faults: list[str] = []

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Watch, in each process that runs tests."""
        if not session.config.pluginmanager.hasplugin("dsession"):
            self._watch = Watch()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Search what a test leaves, once its fixtures are gone, and fail it for a hit."""
        report = yield
        if call.when != "teardown" or self._watch is None:
            return report
        where = getattr(item, "funcargs", {}).get("tmp_path")
        if where is not None:
            self._seen.add(where)
            search(str(where))
        for name, text in report.sections:
            told(name, text.encode(errors="surrogateescape"))
        hits = [*ACCOUNT.take_hits(), *self._watch.hits()]
        if hits:
            report.outcome = "failed"
            report.longrepr = "\n".join(("the key of the hosts shows:", *hits))
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Search what no test had for itself; judge, or tell who adds the figures up."""
        config = session.config
        if self._watch is not None:
            self._finish(config)
        if hasattr(config, "workeroutput"):
            config.workeroutput["canary"] = {
                "figures": dict(self._figures),
                "how": sorted(self._how),
                "hits": self._hits,
            }
            return
        self._faults = faults(self._figures, self._hits)
        if self._faults and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _finish(self, config: pytest.Config) -> None:
        assert self._watch is not None
        factory = config._tmp_path_factory  # type: ignore[attr-defined]  # noqa: SLF001
        base = factory._basetemp  # noqa: SLF001 - pytest says it to fixtures only
        for path in () if base is None else base.iterdir():
            if path not in self._seen and not path.is_symlink():
                search(str(path))
        self._how.add(self._watch.how)
        self._figures += self._watch.end()
        self._figures += Counter(ACCOUNT.counts())
        self._hits += [*self._watch.last, *ACCOUNT.take_hits()]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add a worker's figures (pytest-xdist); one that crashed has none."""
        told_us = getattr(node, "workeroutput", {}).get("canary")
        if told_us is not None:
            self._figures += Counter(told_us["figures"])
            self._how |= set(told_us["how"])
            self._hits += told_us["hits"]

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        """Say how much was looked through."""
        figures = self._figures
        if figures["hosts"] or self._faults:
            words = ", ".join(f"{figures[name]} {name}" for name in sorted(figures))
            how = ", ".join(sorted(self._how))
            terminalreporter.write_sep("=", "the key that hosts of the tests held")
            terminalreporter.write_line(f"looked for in: {words} ({how})")
        for fault in self._faults:
            terminalreporter.write_line(f"FAILED {fault}", red=True)


def faults(figures: Counter[str], hits: list[str]) -> list[str]:
    """Return what is wrong with a run: hits of no test's, or places never looked at."""
    found = [f"the key of the hosts shows: {hit}" for hit in hits]
    if figures["hosts"] >= ENOUGH_HOSTS:
        blind = [name for name in PLACES if not figures[name]]
        found += [f"{figures['hosts']} hosts, and no {name} searched" for name in blind]
    return found
