"""The search for the key of the hosts is not blind.

It finds it in each form and place.

Each search here is for another key than the one that the tests' hosts hold, so that what is
planted is found by nobody else.
"""

import base64
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, urlencode

import pytest
import trio

from hostlib import keys
from tests.architecture.tree import ROOT
from tests.helpers.canary import (
    PIECE_BYTES,
    VARIABLE,
    Account,
    forms,
    found_in,
    leave_out,
    masked,
    search,
    told,
)
from tests.helpers.canary_plugin import ENOUGH_HOSTS, PLACES, Watch, faults
from tests.helpers.stage import PYTHON, Stage, eventually, open_stage, stage

__all__ = ["stage"]

MIDDLE = "0123456789abcdef89abcdef"
OTHER = f"sk-canary+{MIDDLE}/aa=b"
FORMS = forms(MIDDLE)


def lower(text: str) -> str:
    """Write the escapes of a URL in lower case."""
    return text.replace("%2B", "%2b").replace("%2F", "%2f").replace("%3D", "%3d")


WRITTEN: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "URL": lambda key: quote(key, safe=""),
    "URL, lower case": lambda key: lower(quote(key, safe="")),
    "path": quote,
    "form": quote_plus,
    "form, decoded once too often": lambda key: key.replace("+", " "),
    "query": lambda key: urlencode({"key": key, "b": "c"}),
    "every byte in a URL": lambda key: "".join(f"%{b:02X}" for b in key.encode()),
    "JSON": lambda key: json.dumps({"key": key}),
    "JSON as others write it": lambda key: json.dumps(key).replace("/", "\\/"),
    "header": lambda key: f"Bearer {key}".upper(),
    "hexadecimal": lambda key: key.encode().hex(),
    "hexadecimal, upper case": lambda key: key.encode().hex().upper(),
}
BASE64 = (base64.b64encode, base64.urlsafe_b64encode)


def test_the_hosts_of_tests_have_the_key_where_a_host_takes_it_from() -> None:
    assert VARIABLE == keys.ENVIRONMENT


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
def test_the_key_is_found_however_it_is_written(written: Callable[[str], str]) -> None:
    text = f"x{written(OTHER)}y".encode()
    assert found_in(text, FORMS)
    assert not found_in(written(OTHER.replace("0123", "3210")).encode(), FORMS)


# At each offset, and as long as any.
@pytest.mark.parametrize("encode", BASE64)
@pytest.mark.parametrize("before", [b"", b"a", b"ab", b"abc"])
@pytest.mark.parametrize("behind", [b"", b"?", b"?>", b"?>~"])
def test_the_key_is_found_in_base64(
    encode: Callable[[bytes], bytes], before: bytes, behind: bytes
) -> None:
    assert found_in(encode(before + OTHER.encode() + behind), FORMS)


def in_a_file(where: Path, key: bytes) -> None:
    (where / "deep" / "er").mkdir(parents=True)
    (where / "deep" / "er" / ".hidden").write_bytes(b"a\0" + key)


def across_pieces(where: Path, key: bytes) -> None:
    (where / "f").write_bytes(b"x" * (PIECE_BYTES - 5) + key + b"y")


def at_the_end(where: Path, key: bytes) -> None:
    (where / "f").write_bytes(b"x" * 3 * PIECE_BYTES + key)


def behind_a_hole(where: Path, key: bytes) -> None:
    with (where / "f").open("wb") as file:
        file.seek(1 << 30)
        file.write(key)


def in_a_name(where: Path, key: bytes) -> None:
    (where / key.decode().replace("/", "_")).touch()


def in_a_link(where: Path, key: bytes) -> None:
    (where / "link").symlink_to(key.decode())


def beneath_long_names(where: Path, key: bytes) -> None:
    fd = os.open(where, os.O_PATH)
    for _ in range(30):  # 6,000 bytes: nobody opens it by its name
        os.mkdir("d" * 200, dir_fd=fd)
        inner = os.open("d" * 200, os.O_PATH, dir_fd=fd)
        os.close(fd)
        fd = inner
    with open(os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=fd), "wb") as file:
        file.write(key)
    os.close(fd)


@pytest.mark.parametrize(
    "plant",
    [
        in_a_file,
        across_pieces,
        at_the_end,
        behind_a_hole,
        in_a_name,
        in_a_link,
        beneath_long_names,
    ],
)
def test_the_key_is_found_in_whatever_lies_in_a_directory(
    tmp_path: Path, plant: Callable[[Path, bytes], None]
) -> None:
    (tmp_path / "calm").write_bytes(b"nothing")
    account = Account(wanted=FORMS)
    search(str(tmp_path), account)
    assert not account.take_hits()
    plant(tmp_path, OTHER.encode())
    search(str(tmp_path), account)
    assert len(account.take_hits()) == 1
    assert account.files >= 2
    assert account.searched_bytes


def test_one_file_is_left_out_and_none_beside_it(tmp_path: Path) -> None:
    account = Account(wanted=FORMS)
    for name in ("key", "key2", "sub"):
        (tmp_path / name).write_text(OTHER)
    leave_out(str(tmp_path / "key"), account)
    search(str(tmp_path), account)
    assert [hit.split("'")[1] for hit in sorted(account.take_hits())] == [
        str(tmp_path / "key2"),
        str(tmp_path / "sub"),
    ]


def test_the_key_is_found_in_what_somebody_says() -> None:
    account = Account(wanted=FORMS)
    told("a reply", b"nothing", account)
    assert not account.hits
    told("a reply", b"OK " + OTHER.encode(), account)
    assert account.take_hits() == [f"a reply, as {MIDDLE}"]
    assert (account.texts, account.hits) == (2, [])


async def plant(stage: Stage, place: str) -> None:
    """Start a child that has the key somewhere."""
    # The kernel tells of an exec after it has closed what the host hears it by.
    runs = stage.where / "runs"
    program = f"import time; open({str(runs)!r}, 'x'); time.sleep(1000)"
    words = [*PYTHON, "-c", program]
    changes: dict[str, Any] = {}
    if place == "environment":
        changes["env"] = {"PATH": os.defpath, "A": OTHER}
    elif place == "arguments":
        words.append(OTHER)
    fd = os.open(stage.where / MIDDLE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    if place == "descriptor":
        changes["stdio"] = (stage.null, fd, 2)
    await stage.spawn(*words, **changes)
    os.close(fd)
    await eventually(runs.exists)


# A host is started when it is watched already, as the tests' hosts are: its launchpad is
# known by its exec, and who is nobody's child by then is this process's later.
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--walk",)], ids=["events", "walks"])
@pytest.mark.parametrize("place", ["nowhere", "environment", "arguments", "descriptor"])
async def test_the_watcher_finds_the_key_in_a_child(
    tmp_path: Path, place: str, options: tuple[str, ...]
) -> None:
    watch = Watch(FORMS, *options)
    async with open_stage(tmp_path) as stage:
        # One that is the tests' own, and no host's child, may have it.
        await trio.run_process([*PYTHON, "-c", "", OTHER])
        await plant(stage, place)
        figures = watch.end()
    assert bool(watch.last) is (place != "nowhere"), watch.last
    assert figures["children"] >= 2  # the launchpad too
    assert figures["bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["environment", "descriptor", "sibling"])
async def test_a_child_finds_the_key_around_itself(stage: Stage, place: str) -> None:
    assert await (await stage.puppet()).do(f"around({masked(FORMS)!r})") == []
    if place == "environment":
        child = await stage.puppet(env={"PATH": os.defpath, "A": OTHER})
        where = "/proc/self/environ"
    elif place == "descriptor":
        child = await stage.puppet()
        name = os.fspath(stage.where / MIDDLE)
        number = await child.do(f"os.open({name!r}, os.O_CREAT | os.O_RDWR)")
        where = f"link {number}"
    else:
        sibling = await stage.puppet(env={"PATH": os.defpath, "A": OTHER})
        child = await stage.puppet()
        where = f"/proc/{sibling.pid}/environ"
    assert where in await child.do(f"around({masked(FORMS)!r})")


TESTS = """
import os, sys
from tests.helpers.canary import ACCOUNT, KEY, leave_out
def test_writes(tmp_path): (tmp_path / "f").write_text(KEY)
def test_says(): print(KEY)
def test_has_a_key_file(tmp_path):
    (tmp_path / "key").write_text(KEY)
    leave_out(str(tmp_path / "key"))
def test_leaves_it_elsewhere(tmp_path_factory):
    (tmp_path_factory.mktemp("x") / "f").write_text(KEY if len(sys.argv) > 99 else "")
def test_is_calm(tmp_path): print("nothing")
"""

CONFTEST = """
from tests.helpers.canary_plugin import CanaryPlugin
def pytest_configure(config): config.pluginmanager.register(CanaryPlugin())
"""


def run(where: Path, tests: str) -> tuple[int, str]:
    """Run tests in a process of their own; the status, and what it said."""
    (where / "conftest.py").write_text(CONFTEST)
    (where / "test_it.py").write_text(tests)
    words = ("-m", "pytest", "-q", "-rA", "-c", os.devnull, "-p", "no:cacheprovider")
    places = (f"--rootdir={where}", f"--basetemp={where}/base", str(where))
    done = subprocess.run(
        [sys.executable, *words, *places],
        cwd=where, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.slow
def test_a_test_that_lets_the_key_out_fails(tmp_path: Path) -> None:
    status, said = run(tmp_path, TESTS)
    assert status == 1
    failed = {
        line.split("::")[1].split()[0]
        for line in said.splitlines()
        if line.startswith("ERROR ")
    }
    assert failed == {"test_writes", "test_says"}, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "fault"),
    [
        (
            TESTS.replace('KEY if len(sys.argv) > 99 else ""', "KEY"),
            "the key of the hosts shows",
        ),
        (
            "from tests.helpers.canary import ACCOUNT\ndef test_x(): ACCOUNT.hosts += 20",
            "no children searched",
        ),
    ],
    ids=["a directory of no test's", "nothing searched"],
)
def test_a_run_fails_for_what_no_test_has_found(
    tmp_path: Path, tests: str, fault: str
) -> None:
    wanted = tests.replace("(KEY)\ndef test_says(): print(KEY)", "('')")
    status, said = run(tmp_path, wanted)
    assert status == 1
    assert "ERROR" not in said
    assert fault in said


def test_figures_that_prove_nothing_are_a_fault() -> None:
    whole = Counter(dict.fromkeys(("hosts", *PLACES), 1))
    assert faults(whole, []) == []
    assert faults(Counter(hosts=ENOUGH_HOSTS - 1), []) == []
    assert len(faults(Counter(hosts=ENOUGH_HOSTS), [])) == len(PLACES)
    many = Counter({**whole, "hosts": ENOUGH_HOSTS})
    assert faults(many, []) == []
    assert faults(many, ["there"]) == ["the key of the hosts shows: there"]
