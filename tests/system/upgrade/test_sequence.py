"""A host is replaced again and again while its children count.

Nothing is lost or twice.

Every child sends requests cut anywhere, three and more under way at once, and checks each
byte that comes back; at the end the files must hold each number once.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.replacing import SEQUENCE, replaced
from tests.helpers.rounds import LONG

pytestmark = pytest.mark.slow

NUMBERS = 100_000

SHELL = r"""
n=0
printf 'OPEN shell a false\n' >&3; read -r reply <&3
fileno=${reply#OK }
until [ -e "$1" ] && [ $((n % 20)) -eq 0 ]; do
    printf 'WRITE %d 8\n%07d\n' "$fileno" "$n" >&3
    read -r reply <&3
    [ "$reply" = "OK 8" ] || { echo "wrong shell: $n: $reply"; exit 1; }
    n=$((n + 1))
done
echo "done $n"
"""


def numbers(count: int) -> bytes:
    """The first numbers, as children write them."""
    return b"".join(b"%07d\n" % number for number in range(count))


def counting(stop: Path, name: str, attached: int = 0, **spec: Any) -> dict[str, Any]:
    """Describe a child that counts."""
    command = [*SEQUENCE, name, str(attached), str(stop)]
    return {"command": command, "name": name, **spec}


def count_through(where: Path, rounds: int) -> None:
    """Replace a host so often while children of every kind count."""
    (where / "root").mkdir()
    (where / "root" / "numbers").write_bytes(numbers(NUMBERS))
    stop = where / "stop"
    kinds = [
        counting(stop, "plain"),
        counting(stop, "pipes", transport="pipes"),
        counting(stop, "attached", 2),
        counting(stop, "both", 1, transport="pipes", dialect=2),
        counting(stop, "staged", publish="on-close"),
        counting(stop, "bounded", max_bytes=1 << 30, max_files=50),
        {"command": ["/bin/sh", "-c", SHELL, "sh", str(stop)], "name": "shell"},
    ]
    with replaced(where, *kinds) as host:
        pids = list(host.pids)
        host.replace()
        before = len(host.descriptors())
        for _ in range(rounds - 1):
            host.replace()
            assert host.pids == pids
        assert len(host.descriptors()) <= before + 2
        host.assert_no_leaks()
        stop.touch()
        for _ in kinds:
            assert host.hear("ended")[1] == "0", [host.said(k["name"]) for k in kinds]
        assert host.wait() == 0
        assert len(host.events("host.replaced")) == rounds
    check_files(where, kinds)


def check_files(where: Path, kinds: list[dict[str, Any]]) -> None:
    """Check that each child's files hold each number once."""
    for kind in kinds:
        name = kind["name"]
        said = (where / f"said-{name}").read_text()
        assert said.startswith("done "), said
        wanted = numbers(int(said.split()[1]))
        assert wanted, "it was replaced before it had counted"
        mine = [
            file
            for file in os.listdir(where / "root")
            if file == name or (file.startswith(f"{name}.") and "large" not in file)
        ]
        assert mine
        for file in mine:
            if name == "staged" and file.endswith(".written"):
                continue  # it was not closed by its child: it must not appear
            assert (where / "root" / file).read_bytes() == wanted, file


# spec T3, W1, R1, I4: strictly one reply a request, whatever happens to the host.
@pytest.mark.timeout(300)
def test_children_that_count_miss_nothing_in_6_exchanges(tmp_path: Path) -> None:
    count_through(tmp_path, 6)


@pytest.mark.chaos
@pytest.mark.skipif(not LONG, reason="6 exchanges are the short form; see make chaos")
@pytest.mark.timeout(600)
def test_children_that_count_miss_nothing_in_100_exchanges(tmp_path: Path) -> None:
    count_through(tmp_path, 100)
