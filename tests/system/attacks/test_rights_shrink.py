"""Rights only shrink, whatever is asked for.

Files, modes, tools, quota, model (I8).

A child with a random policy gives up rights and attaches connections, again and again,
as a relay does for each level beneath it.  After each step the host is asked what the
connection may do: files by trying to open each, the model and its accounts where the
host looks them up.  The rights after a step are never more than before, and a refused one
leaves exactly what there was.
"""

import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import trio
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from supervisor.llm.opening import open_llm
from supervisor.llm.service import LlmService
from tests.helpers.command import sandhost
from tests.helpers.provider import key_file, provider_process
from tests.helpers.rounds import LONG
from tests.helpers.stage import Puppet, Stage, llm_section, open_stage
from vfs.clients import Client

pytestmark = [pytest.mark.slow, pytest.mark.attack, pytest.mark.timeout(400)]


TOPS = ("root", "grant", "else")
SPOTS = ("file", "a/file", "a/b/file")
LINKS = ("in-link/file", "out-link/file")
MODELS = ("big", "small", "cheap")
TOOLS = ("make", "cc", "node")

INNER = st.sampled_from((".", "file", "a", "a/file", "a/b", "a/b/file", "in-link"))
ODD = st.sampled_from(("..", "a/../..", "out-link", "nothing", "/", "/{where}/.."))
BELOW = st.tuples(st.sampled_from(TOPS), INNER).map("/{{where}}/{0[0]}/{0[1]}".format)
NAMES = st.one_of(INNER, BELOW, BELOW, ODD)
LISTS = st.lists(NAMES, max_size=3)
SETS = st.lists(st.sampled_from(TOOLS), unique=True)
QUOTAS = st.sampled_from((-1.0, 0.0, 10.0, 50.0, 99.5, 1000.0, 1e12))
PARTS: dict[str, st.SearchStrategy[Any]] = {
    "read": LISTS,
    "write": LISTS,
    "tools": SETS,
    "model": st.sampled_from((*MODELS, "other")),
    "quota": QUOTAS,
}
# One part alone as well: a document is refused as a whole for any part of it, and then
# says nothing of the others.
DOCUMENTS = st.one_of(
    st.fixed_dictionaries({}, optional=PARTS),
    *(st.fixed_dictionaries({name: part}) for name, part in PARTS.items()),
)
Step = dict[str, Any] | Literal["attach"]
STEPS = st.lists(st.just("attach") | DOCUMENTS, min_size=1, max_size=6)
GRANTS = st.lists(
    st.tuples(st.sampled_from(TOPS), st.sampled_from((*SPOTS, "a"))), max_size=3
)
POLICIES = st.fixed_dictionaries(
    {
        "top_level": st.booleans(),
        "read": GRANTS,
        "write": GRANTS,
        "model": st.none() | st.sampled_from(MODELS),
        "tools": st.none() | SETS.map(frozenset),
        "quota": st.none() | st.just(100.0),
    }
)


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights of a connection.

    Attributes:
        files: (file, mode).
        models: those that it may ask.
        tools: those that may be run for it.
        quota: weighted tokens that it and all above it may use.
    """

    files: frozenset[tuple[str, str]]
    models: frozenset[str]
    tools: frozenset[str]
    quota: float

    def is_within(self, other: "Rights") -> bool:
        """Whether nothing of this is not in the other one."""
        return (
            self.files <= other.files
            and self.models <= other.models
            and self.tools <= other.tools
            and self.quota <= other.quota
        )


def grow(where: Path) -> None:
    """Make the same files at three places."""
    for top in TOPS:
        (where / top / "a" / "b").mkdir(parents=True, exist_ok=True)
        for name in SPOTS:
            (where / top / name).write_text(f"{top}/{name}")
        (where / top / "in-link").symlink_to("a/b")
        (where / top / "out-link").symlink_to("../else/a")


def names_of(where: Path) -> list[tuple[str, bytes, bytes]]:
    """Every file, a name that could be it, and the claim; links are what they lead to."""
    found = []
    for top in TOPS:
        targets = {name: f"{top}/{name}" for name in SPOTS}
        targets |= dict(zip(LINKS, (f"{top}/a/b/file", "else/a/file"), strict=True))
        for name, target in targets.items():
            path = os.fsencode(where / top / name)
            found += [(target, path, b"false"), (target, path, b"true")]
            found.append((target, f"{top}/{name}".encode(), b"true"))  # from its cwd
            if top == "root":
                found.append((target, name.encode(), b"false"))
    return found


TRIED = """[[isinstance(n := opened(name, mode, claim, {fd}), int)
 and ask(b'CLOSE %d\\n' % n, {fd}) == b'OK' for name, claim in {names}]
 for mode in (b'r', b'a', b'r+')]"""


async def rights_of(
    child: Puppet, fd: int | None, client: Client, where: Path, service: LlmService
) -> Rights:
    """Find out what a connection may do."""
    known = names_of(where)
    text = TRIED.format(fd=fd, names=[one[1:] for one in known]).replace("\n", "")
    lists = await child.do(text)
    files = {
        (known[i][0], mode)
        for mode, row in zip(("r", "a", "r+"), lists, strict=True)
        for i, may in enumerate(row)
        if may
    }
    limits = [
        node.tokens.limit for node in service.models.accounts.node_of(client).path()
    ]
    tools = client.policy.tools
    own = {service.models.model_name(client, claim=claim) for claim in (False, True)}
    assert own <= service.models_of(client)
    return Rights(
        frozenset(files),
        service.models_of(client),
        frozenset({*TOOLS, "any"}) if tools is None else tools,
        min((limit for limit in limits if limit is not None), default=math.inf),
    )


async def narrow(child: Puppet, fd: int | None, where: Path, document: Step) -> bytes:
    """Ask for less; return the reply."""
    text = json.dumps(document).replace("/{where}", os.fspath(where)).encode()
    request = b"NARROW %d\n%b" % (len(text), text)
    reply: bytes = await child.do(f"ask({request!r}, {fd})")
    return reply


def newest(stage: Stage) -> Client:
    """The client that was connected last."""
    return list(stage.host.fs.tables.clients.values())[-1]


async def take_steps(lives: list[tuple[dict[str, Any], list[Step]]]) -> None:
    """Have children of one host, one after the other, take their steps."""
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        grow(where)
        async with open_stage(where) as stage, open_model(stage, where) as service:
            for policy, steps in lives:
                grants = {
                    right: tuple(f"{where}/{top}/{spot}" for top, spot in policy[right])
                    for right in ("read", "write")
                }
                child = await stage.puppet(**{**policy, **grants})
                await take_steps_of(child, steps, stage, service)
                await child.kill()


async def take_steps_of(
    child: Puppet, steps: list[Step], stage: Stage, service: LlmService
) -> None:
    """Take one child's steps, and look at its rights after each."""
    fd: int | None = None
    where, client = stage.where, newest(stage)
    before = await rights_of(child, fd, client, where, service)
    for step in steps:
        if step == "attach":
            fd = await child.do(f"attached({fd})")
            client, refused = newest(stage), False
        else:
            reply = await narrow(child, fd, where, step)
            refused = reply.startswith(b"ERROR invalid rights: ")
            assert refused or reply == b"OK", reply
        after = await rights_of(child, fd, client, where, service)
        assert after.is_within(before), (step, before, after)
        if refused:
            assert after == before, step
        before = after


def open_model(stage: Stage, where: Path) -> Any:
    """Offer a model, which nobody asks, to the children of a host."""
    llm = llm_section(
        base_url="http://127.0.0.1:9/v1",
        api_key_file=key_file(where),
        default_model="big",
        restricted_model="small",
        quota={"max_tokens": 500},
    )
    return open_llm(stage.host, llm)


# I8, spec A5, N1, attack 38. Several children an example: a host takes long to open. So
# nothing is shrunk, which takes minutes; the step that gave a right is told.
@pytest.mark.chaos
@settings(
    max_examples=8 if LONG else 4, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
@given(lives=st.lists(st.tuples(POLICIES, STEPS), min_size=6, max_size=12))
def test_no_step_gives_a_right(lives: list[tuple[dict[str, Any], list[Step]]]) -> None:
    trio.run(take_steps, lives)


# I8, spec A5: the model of a policy is all that its child may ask; the one that the host
# has for others is not among its rights.
def test_a_model_of_a_policy_is_the_only_one() -> None:
    policy: dict[str, Any] = {
        "top_level": False, "read": [], "write": [],
        "model": "cheap", "tools": None, "quota": None,
    }  # fmt: skip

    async def asks(document: Step) -> tuple[bytes, frozenset[str]]:
        with tempfile.TemporaryDirectory() as name:
            where = Path(name)
            async with open_stage(where) as stage, open_model(stage, where) as service:
                child = await stage.puppet(**{**policy, "read": (), "write": ()})
                reply = await narrow(child, None, where, document)
                return reply, service.models_of(newest(stage))

    refused = b"ERROR invalid rights: not within this client's rights: model 'small'"
    assert trio.run(asks, {"model": "small"}) == (refused, frozenset({"cheap"}))
    assert trio.run(asks, {"model": "cheap"}) == (b"OK", frozenset({"cheap"}))


# Through real relays: at each level a program tries everything and says what it got.

PROBE = """
import json, os, sys
from vfs.client import Client
client, found = Client(), []
for name in sys.argv[1:]:
    for mode in ("r", "a", "r+"):
        for claim in (False, True) if name[0] == "/" else (False,):
            try:
                client.close(client.open(name, mode, claim))
            except OSError:
                continue
            found.append((name, mode))
try:
    model = client.llm_chat(prompt="who").model
except OSError:
    model = None
limit = client.llm_quota().partition("/")[2].partition(" ")[0]
print(json.dumps([found, model, limit]), flush=True)
"""


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    """A stand-in for the model, as a process of its own."""
    with provider_process() as base_url:
        yield base_url


def levels_of(chance: random.Random) -> list[list[str]]:
    """The rights that three nested relays leave, each of the rest.

    Names that are given are the only ones from then on; where none is, all stay.
    """
    found = []
    left = {"read": READS, "write": WRITES}
    quota = 500
    for _ in range(3):  # a larger quota than what is left is asked for, too
        given = {
            option: chance.sample(names, min(len(names), chance.choice((0, 1, 2))))
            for option, names in left.items()
        }
        words = [
            word
            for option, chosen in given.items()
            for name in chosen
            for word in (f"--{option}", name)
        ]
        if words:
            left = {
                option: tuple(n for n in names if any(map(within(n), given[option])))
                for option, names in left.items()
            }
        if chance.random() < 0.3:
            words += ["--model", "small"]
        if chance.random() < 0.6:
            asked = chance.choice((4 * quota, quota, quota // 2, quota // 4))
            words += ["--quota", str(max(50, asked))]
            quota = max(50, min(quota, asked))
        found.append(words)
    return found


READS, WRITES = (".", "a", "a/b", "file", "a/file"), (".", "a", "a/b", "a/b/file")


def within(name: str) -> Callable[[str], bool]:
    """Return what tells whether a name lies in a directory, or is it."""
    return lambda top: top in {".", name} or name.startswith(f"{top}/")


# I8, spec A5, N1, attack 38
@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(4 if LONG else 2))
def test_no_relay_gives_a_right(provider: str, seed: int) -> None:
    levels = levels_of(random.Random(seed))
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        grow(where)
        (where / "probe.py").write_text(PROBE)
        (where / "config.toml").write_text(
            f'[llm]\nbase_url = "{provider}"\napi_key_file = "{key_file(where)}"\n'
            'default_model = "big"\nrestricted_model = "small"\n'
            "[llm.quota]\nmax_tokens = 500\n"
        )
        tried = [*SPOTS, *LINKS, *(f"{where}/{top}/file" for top in TOPS)]
        # Each level tries, then becomes the relay of the next one.
        probe = [sys.executable, "-I", f"{where}/probe.py", *tried]
        script = ""
        for words in reversed(levels):
            inner = f'"$@"\n{script}'
            quoted = inner.replace("'", "'\\''")
            script = (
                f"exec sandhost relay {' '.join(words)} -- sh -c '{quoted}' sh \"$@\""
            )
        options: list[str | Path] = [
            "--config",
            where / "config.toml",
            "--root",
            where / "root",
        ]
        options += ["--sandbox", "none", "--read", where / "grant", "--top-level"]
        outcome = sandhost(
            "run",
            *options,
            "--",
            "sh",
            "-c",
            f'"$@"\n{script}',
            "sh",
            *probe,
            cwd=where,
        )
        told = [json.loads(line) for line in outcome.out.splitlines()]
        assert outcome.status == 0, outcome
        assert len(told) == 1 + len(levels), outcome
        assert told[0][1] is not None, outcome
        for above, below in pairwise(told):
            (wide, model, limit), (less, model_after, limit_after) = above, below
            reach = {tuple(one) for one in wide}
            assert {tuple(one) for one in less} <= reach
            assert model_after in {model, "small", None}
            assert float(limit_after) <= float(limit)
