"""Costs of the gateway for a call, beside the client library alone.

A child of `sandhost run` asks a stand-in provider (`demo/provider`, a process of its
own) through FD 3 and directly, in turn. The stand-in answers at once, so all that is
measured is the way. The host streams from it, whatever its child asks for: the library
alone is measured plainly, which the aim speaks of, and streamed, which is the same work.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import (
    REPOSITORY,
    MeasureError,
    clean_environment,
    percentile,
    run,
    workplace,
)
from benchmarks.options import add_sandhost, parse, parser
from benchmarks.report import Report, Row, at_most

NAME = "llm"
METHOD = "calls through the host and of the library alone, in turn, medians"
ROUNDS = 200
ROUNDS_AT_ONCE = 5
KEY = "key-of-a-bench"
TIMEOUT_S = 60.0  # 900 calls of some 4 ms, on a machine that does other things too
CONFIG = """
[limits]
clients_per_child = 128
[llm]
base_url = "{url}"
api_key_file = "{key}"
"""
LEDGER = """
[llm.quota]
max_tokens = 1000000000
window = "never"
[host]
state_dir = "{state}"
"""


@contextmanager
def provider() -> Iterator[str]:
    """Run the stand-in; yield its base URL."""
    command = [sys.executable, "-m", "demo.provider", "--key", KEY]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, env=clean_environment()
    ) as process:
        try:
            line = process.stdout.readline() if process.stdout else b""
            if not line:
                raise MeasureError("the stand-in provider did not start")
            yield line.decode().strip()
        finally:
            process.kill()


def figures(
    sandhost: Path, mode: str, rounds: int, *, on_disk: bool = False
) -> dict[str, list[float]]:
    """Have a child measure; return its times in ms.

    Args:
        sandhost: the command.
        mode: of ``llm_child``.
        rounds: how often.
        on_disk: costs of calls are kept in a file, as for a daemon.
    """
    with workplace() as place, provider() as url:
        (place / "root").mkdir()
        (place / "root" / "file").write_bytes(b"x" * 4096)
        (place / "key").write_text(KEY, encoding="ascii")
        (place / "key").chmod(0o600)
        config = CONFIG.format(url=url, key=place / "key")
        if on_disk:
            config += LEDGER.format(state=place / "state")
        (place / "config.toml").write_text(config, encoding="utf-8")
        command = [str(sandhost), "run", "--network", "host"]
        command += ["--config", str(place / "config.toml")]
        command += ["--root", str(place / "root"), "--cwd", str(REPOSITORY), "--"]
        child = [sys.executable, "-m", "benchmarks.llm_child", mode, str(rounds), url]
        printed = run([*command, *child], timeout_s=TIMEOUT_S).stdout
    try:
        found: dict[str, list[float]] = json.loads(printed)
    except ValueError:
        raise MeasureError(f"the child printed no figures: {printed[:80]!r}") from None
    return found


def single_rows(sandhost: Path, rounds: int) -> list[Row]:
    """Compare single calls."""
    times = figures(sandhost, "one", rounds)
    host, plain, streamed, bare = (
        statistics.median(times[name]) for name in ("host", "plain", "streamed", "bare")
    )
    # Of neighbours: what another program takes of the machine, it takes of both.
    pairs = zip(times["host"], times["plain"], strict=True)
    paired = statistics.median(one / other for one, other in pairs)
    data = {
        "host_ms": host,
        "plain_ms": plain,
        "streamed_ms": streamed,
        "bare_ms": bare,
    }
    detail = f"{host:.2f} / {plain:.2f} ms, {streamed:.2f} streamed, {bare:.2f} bare"
    return [
        Row("LLM_CHAT - library", host - plain, "ms", at_most(2.0), detail, data),
        Row("LLM_CHAT / library", host / plain, "x", at_most(1.5), detail, data),
        Row("LLM_CHAT / library, of neighbours", paired, "x", None, detail, data),
        Row("LLM_CHAT / library, streamed", host / streamed, "x", None, detail, data),
        Row("LLM_CHAT / limit (bare socket)", host / bare, "x", None, detail, data),
    ]


def ledger_rows(sandhost: Path, rounds: int) -> list[Row]:
    """Compare single calls whose cost is on the disk before the answer is out."""
    times = figures(sandhost, "one", rounds, on_disk=True)
    host, plain = (statistics.median(times[name]) for name in ("host", "plain"))
    detail = f"{host:.2f} / {plain:.2f} ms, its cost in SQLite"
    data = {"host_ms": host, "plain_ms": plain}
    return [
        Row("LLM_CHAT - library, kept", host - plain, "ms", at_most(2.0), detail, data),
        Row("LLM_CHAT / library, kept", host / plain, "x", None, detail, data),
    ]


def crowd_rows(sandhost: Path, rounds: int) -> list[Row]:
    """Compare 100 calls at once, and READ beside them."""
    times = figures(sandhost, "many", min(rounds, ROUNDS_AT_ONCE))
    host, plain, streamed = (
        statistics.median(times[name]) for name in ("host", "plain", "streamed")
    )
    read = percentile(times["read"], 99)
    data = {"host_ms": host, "plain_ms": plain, "streamed_ms": streamed}
    detail = f"{host:.0f} / {plain:.0f} ms, {streamed:.0f} streamed"
    beside = {"reads": float(len(times["read"])), "max_ms": max(times["read"])}
    return [
        Row("100 at once / library", host / plain, "x", at_most(1.3), detail, data),
        Row(
            "100 at once / library, streamed", host / streamed, "x", None, detail, data
        ),
        Row("READ beside them, p99", read, "ms", at_most(100.0), "", beside),
    ]


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print, and return the exit status."""
    options = parser(NAME, METHOD, rounds=ROUNDS)
    add_sandhost(options)
    given = parse(options, argv)
    rows: list[Row] = []
    for name, part in (
        ("LLM_CHAT", single_rows),
        ("LLM_CHAT, kept", ledger_rows),
        ("100 at once", crowd_rows),
    ):
        try:
            rows += part(given.sandhost, given.rounds)
        except MeasureError as error:
            rows.append(Row(name, None, "", detail=str(error)))
    report = Report(NAME, METHOD, given.rounds, rows)
    return report.publish(save=given.save, strict=given.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
