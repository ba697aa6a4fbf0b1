"""LLM fds: costs of storing, reading, searching, forking, beside coreutils, grep.

The store is used in this process; the yardsticks are programs on the same bytes in a
file on tmpfs, run next to it in turn. `wc -l` reads everything once and counts lines,
which is the least that a page table needs.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Self

import trio

from benchmarks.measure import MeasureError, in_turn, workplace
from benchmarks.options import parse, parser
from benchmarks.report import Aim, Report, Row, at_most
from supervisor.llmfd import TOOLS, ClientFiles, FdTable, Process, ProcessParts, Store
from supervisor.llmfd.arguments import bind
from supervisor.llmfd.search import compile_query, search
from supervisor.llmfd.store import STEP_BYTES, Writer
from vfs.filesystem import Filesystem
from vfs.ledger import Ledger
from vfs.places import close_places, open_place
from vfs.policy import Policy

NAME = "fds"
METHOD = "one process against programs on the same bytes, medians of ratios"
ROUNDS = 7

CREATE_AIM = at_most(6.0)
PAGE_AIM = at_most(50.0)
LINES_AIM = at_most(100.0)
FORK_AIM = at_most(1.0)
FORK_MEMORY_AIM = at_most(1024.0)
LITERAL_AIM = at_most(4.0)
REGEX_AIM = at_most(4.0)
MEMORY_AIM = at_most(64.0)
EVIL_AIM = at_most(1.0)
EVIL_BYTES = 10_000_000


def log_text(size: int) -> bytes:
    """Return a log of `size` bytes; one line in a hundred is an error."""
    lines = []
    for number in range(200_000):
        level = "ERROR upstream Timeout" if number % 97 == 0 else "INFO handled"
        lines.append(
            f"2026-01-01T10:00:{number % 60:02}.{number % 999_983:06} {level} request"
            f" {number} in {number % 977} ms status=200 path=/items/{number % 4444}"
        )
    one = "\n".join(lines).encode() + b"\n"
    return (one * (size // len(one) + 1))[:size]


def seconds(work: Callable[[], object]) -> float:
    """Return how long something takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def program(*words: str) -> Callable[[], float]:
    """Return what times a program to its end."""

    def run() -> float:
        begin = time.perf_counter()
        done = subprocess.run(words, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise MeasureError(f"{words[0]} failed with status {done.returncode}")
        return time.perf_counter() - begin

    return run


def ratios(rounds: int, tried: Callable[[], float], peer: Callable[[], float]) -> Row:
    """Return the median ratio of neighbouring runs, without a name yet."""
    pairs = [in_turn(n, [tried, peer]) for n in range(rounds + 1)][1:]
    ours = statistics.median(pair[0] for pair in pairs)
    theirs = statistics.median(pair[1] for pair in pairs)
    ratio = statistics.median(pair[0] / pair[1] for pair in pairs)
    data = {"ours_ms": ours * 1000, "peer_ms": theirs * 1000}
    detail = f"{data['ours_ms']:.1f} / {data['peer_ms']:.1f} ms"
    return Row("", ratio, "x", None, detail, data)


def named(row: Row, name: str, aim: Aim) -> Row:
    """Return a row with its name and aim."""
    return Row(name, row.value, row.unit, aim, row.detail, row.data)


def create_row(rounds: int, data: bytes, path: Path) -> Row:
    """Store a log and cut its pages, against `wc -l`."""

    def create() -> float:
        store = Store(max_memory=1 << 40)
        return seconds(lambda: store.put(data).text.pages(4000))

    row = ratios(rounds, create, program("wc", "-l", str(path)))
    return named(row, f"create, {len(data) // 10**6} MB / wc -l", CREATE_AIM)


def add_file(writer: Writer, path: Path) -> None:
    """Take a file in, in pieces as the host reads them."""
    with path.open("rb", buffering=0) as file:
        while piece := file.read(STEP_BYTES):
            writer.add(piece)


def large_rows(rounds: int, place: Path) -> list[Row]:
    """Do everything with 1 GB that comes in pieces; watch this process's own memory."""
    path = place / "large.log"
    part = log_text(100_000_000)
    path.write_bytes(part * 10)
    rounds = max(5, rounds)
    made = [create_row(rounds, part * 10, path)]
    del part
    store = Store()

    def create() -> float:
        writer = store.writer()
        begin = time.perf_counter()
        add_file(writer, path)
        content = writer.finish()
        content.text.pages(4000)
        took = time.perf_counter() - begin
        store.drop(content)
        return took

    before = anonymous_kib()
    row = ratios(rounds, create, program("wc", "-l", str(path)))
    made.append(named(row, "create, 1 GB in pieces, on disk / wc -l", CREATE_AIM))
    writer = store.writer()
    add_file(writer, path)
    process = Process(ProcessParts(store, TOOLS))
    process.add(writer.finish(), "bench")
    made += read_rows(process, "1 GB")
    pattern = compile_query("nothing like it", regex=False, case_sensitive=True)
    search(process.table.fds[1].content.text, pattern, context=0, max_results=1)
    grown = (anonymous_kib() - before) / 1024
    made.append(Row("memory grown by all of it, 1 GB", grown, "MiB", MEMORY_AIM))
    made += export_rows(process, place, path)
    process.close()
    return made


def export_rows(process: Process, place: Path, path: Path) -> list[Row]:
    """Write 1 GB to a file through a client's rights, beside `cp`; watch the memory."""
    root = open_place(str(place), read=True, write=True, relative=b"")
    cwd = os.open(place, os.O_PATH | os.O_DIRECTORY)
    client = (fs := Filesystem()).connect(Policy((root,), cwd_fd=cwd), Ledger(), NAME)
    process.files = ClientFiles(fs, client)
    call = partial(process.call, "fd_to_file", fd="fd:1", file_path="exported")
    before = anonymous_kib()
    with Peak() as peak:
        took = seconds(lambda: trio.run(call))
    if (place / "exported").stat().st_size != path.stat().st_size:
        raise MeasureError("the exported file is not whole")
    (place / "exported").unlink()
    peer = program("cp", str(path), str(place / "copy"))()
    (place / "copy").unlink()
    fs.disconnect(client, "over")
    close_places((root,))
    os.close(cwd)
    grown = (peak.kib - before) / 1024
    detail = f"{took * 1000:.0f} / {peer * 1000:.0f} ms"
    return [
        Row("memory grown at most by an export, 1 GB", grown, "MiB", MEMORY_AIM),
        Row("export, 1 GB, flushed / cp", took / peer, "x", None, detail),
    ]


class Peak:
    """The most anonymous memory that this process has in a block, in KiB."""

    def __init__(self) -> None:
        self.kib = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.kib = max(self.kib, anonymous_kib())


def anonymous_kib() -> int:
    """Return RssAnon of this process."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(r"RssAnon:\s+(\d+)", text)
    if match is None:
        raise MeasureError("/proc/self/status has no RssAnon")
    return int(match[1])


def read_rows(process: Process, size: str) -> list[Row]:
    """Read pages and lines at random places."""
    fd = process.table.fds[1]
    pages = len(fd.content.text.pages(fd.page_size))
    total = fd.content.text.index.lines
    chosen = Random(1)  # noqa: S311 - the same places in every run

    def page() -> dict[str, int]:
        return {"page": chosen.randint(1, pages)}

    def lines() -> dict[str, int]:
        return _lines(chosen, total)

    return [
        _timed(process, f"page read, {size}", page, PAGE_AIM),
        _timed(process, f"20 lines read, {size}", lines, LINES_AIM),
    ]


def _timed(
    process: Process, name: str, ask: Callable[[], dict[str, int]], aim: Aim
) -> Row:
    times = []
    tool = process.tool("read_fd")
    for _ in range(2000):
        arguments = {"fd": "fd:1", **ask()}
        begin = time.perf_counter()
        tool.run(process, **bind(tool, (), arguments))
        times.append((time.perf_counter() - begin) * 1e6)
    detail = f"p99 {sorted(times)[1979]:.0f} us"
    return Row(name, statistics.median(times), "us", aim, detail)


def _lines(chosen: Random, total: int) -> dict[str, int]:
    first = chosen.randint(1, total - 20)
    return {"start_line": first, "end_line": first + 19}


def fork_rows(rounds: int) -> list[Row]:
    """Fork a process with 100 descriptors of 10 MB each."""
    store = Store(max_memory=1 << 40)
    table = FdTable(store)
    base = log_text(10_000_000)
    for number in range(100):
        table.add(store.put(b"%d\n" % number + base), "bench", 4000)
    times = []
    forks = []
    before = anonymous_kib()
    for _ in range(rounds * 3):
        begin = time.perf_counter()
        forks.append(table.fork())
        times.append((time.perf_counter() - begin) * 1000)
    grown = (anonymous_kib() - before) / len(forks)
    return [
        Row("fork, 100 fds of 10 MB", statistics.median(times), "ms", FORK_AIM),
        Row("memory of a fork", grown, "KiB", FORK_MEMORY_AIM),
    ]


def search_rows(rounds: int, data: bytes, path: Path) -> list[Row]:
    """Search for a word and for an expression."""
    store = Store(max_memory=1 << 40)
    blob = store.put(data).text

    def finder(query: str, *, regex: bool) -> Callable[[], float]:
        pattern = compile_query(query, regex=regex, case_sensitive=True)
        return lambda: seconds(lambda: search(blob, pattern, context=2, max_results=20))

    evil = EVIL_BYTES * b"a" + b"b"
    text = store.put(evil).text
    pattern = compile_query("(a+)+$", regex=True, case_sensitive=True)
    took = statistics.median(
        seconds(lambda: search(text, pattern, context=0, max_results=1))
        for _ in range(3)
    )
    backtracking = Row("(a+)+$ over a line of 10 MB", took, "s", EVIL_AIM)
    grep = program("/bin/sh", "-c", f"cat {path} | grep -c -F ERROR")
    row = ratios(rounds, finder("ERROR", regex=False), grep)
    rows = [named(row, "literal search / cat | grep -c -F", LITERAL_AIM), backtracking]
    expression = "(?i)error.*timeout"
    name = "regex search / ripgrep"
    if shutil.which("rg") is None:
        took = seconds(finder(expression, regex=True)) * 1000
        absent = f"ripgrep absent; ours {took:.0f} ms"
        return [*rows, Row("regex search", took, "ms", None, absent)]
    peer = program("rg", "-c", expression, str(path))
    row = ratios(rounds, finder(expression, regex=True), peer)
    return [*rows, named(row, name, REGEX_AIM)]


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print, and return the exit status."""
    given = parse(parser(NAME, METHOD, rounds=ROUNDS), argv)
    rows: list[Row] = []
    with workplace() as place:
        data = log_text(100_000_000)
        path = place / "log"
        path.write_bytes(data)
        rows.append(create_row(given.rounds, data, path))
        rows += search_rows(given.rounds, data, path)
        process = Process(ProcessParts(Store(), TOOLS))
        process.add(process.shared.store.put(data), "bench")
        rows += read_rows(process, "100 MB")
        del data, process
        path.unlink()
        rows += fork_rows(given.rounds)
        rows += large_rows(given.rounds, place)
    report = Report(NAME, METHOD, given.rounds, rows)
    return report.publish(save=given.save, strict=given.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
