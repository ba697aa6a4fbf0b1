"""Which sidecar runs a tool: the rules, without sidecars."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.toolexec.kinds import (
    ALL_TOOLS,
    DEV_TOOLS,
    KINDS,
    OWNERS,
    is_tool_name,
    toolchains_for,
)
from supervisor.toolexec.routes import ToolRefusedError, candidates, unavailable


@dataclass(frozen=True)
class Fake:
    """A sidecar, as far as routing looks at it."""

    name: str
    kind: str
    is_running: bool = True
    more: frozenset[str] | None = None
    allow: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        allow = KINDS[self.kind].allow if self.more is None else self.more
        object.__setattr__(self, "allow", allow)


ALL = tuple(Fake(kind, kind) for kind in reversed(KINDS))


def names(tool: str, *sidecars: Fake) -> list[str]:
    """The sidecars that may run a tool, best first."""
    return [sidecar.name for sidecar in candidates(tool, sidecars)]


# ToolExec 6: the order of kinds for development tools.
@pytest.mark.parametrize("tool", DEV_TOOLS)
def test_a_development_tool_goes_to_the_kinds_in_their_order(tool: str) -> None:
    assert names(tool, *ALL) == ["c-cpp", "rust", "go", "node", "python"]


# ToolExec 6: every other tool belongs to one kind.
@pytest.mark.parametrize(
    ("tool", "kind"),
    [
        *((tool, "rust") for tool in ("cargo", "rustc")),
        *((tool, "node") for tool in ("node", "npm", "npx", "tsc", "ts-node")),
        *((tool, "python") for tool in ("python", "python3", "pip", "pip3")),
        *((tool, "go") for tool in ("go", "gofmt")),
    ],
)
def test_a_tool_of_a_kind_goes_to_that_kind_only(tool: str, kind: str) -> None:
    assert names(tool, *ALL) == [kind]


def test_the_tables_name_what_the_contract_names() -> None:
    tools = "make cmake ninja pkg-config gcc g++ clang clang++ cc c++"
    assert tuple(tools.split()) == DEV_TOOLS
    assert len(OWNERS) == 13
    assert len(ALL_TOOLS) == 23
    assert all(map(is_tool_name, ALL_TOOLS))


def test_one_that_does_not_run_is_passed_over() -> None:
    down = Fake("c", "c-cpp", is_running=False)
    assert names("make", down, Fake("n", "node"), Fake("r", "rust")) == ["r", "n"]


def test_one_whose_list_lacks_the_tool_is_passed_over() -> None:
    bare = Fake("c", "c-cpp", more=frozenset({"gcc"}))
    assert names("make", bare, Fake("n", "node")) == ["n"]


def test_two_of_a_kind_are_asked_in_the_order_of_the_configuration() -> None:
    assert names("go", Fake("b", "go"), Fake("a", "go")) == ["b", "a"]


def test_a_list_may_name_any_tool() -> None:
    more = Fake("p", "python", more=frozenset({"jq", "cargo"}))
    assert names("jq", *ALL, more) == ["p"]
    assert names("cargo", more, *ALL) == ["rust", "p"]
    with pytest.raises(ToolRefusedError) as refused:
        names("python3", more)
    assert refused.value.status == 403


# ToolExec 2: 403 and 409, with their words.
def test_a_tool_that_no_list_has_is_forbidden() -> None:
    few = Fake("mine", "rust", more=frozenset({"make"}))
    with pytest.raises(ToolRefusedError) as refused:
        names("cargo", few)
    assert refused.value.status == 403
    text = b"forbidden: tool 'cargo' is not permitted by the allowlist of 'mine'\n"
    assert refused.value.body == text


@pytest.mark.parametrize(
    ("tool", "advice"),
    [
        ("make", "--toolchain c-cpp or --toolchain rust"),
        ("c++", "--toolchain c-cpp or --toolchain rust"),
        ("cargo", "--toolchain rust"),
        ("tsc", "--toolchain node"),
        ("jq", "--toolchain go"),
    ],
)
def test_an_unavailable_tool_names_the_toolchains_that_have_it(
    tool: str, advice: str
) -> None:
    why = unavailable(tool, [Fake("g", "go", more=frozenset({"jq"}))])
    assert why.status == 409
    assert why.body.decode() == (
        f"tool '{tool}' not available in running sidecars; start an appropriate"
        f" toolchain (e.g., {advice})\n"
    )


def test_a_tool_of_a_kind_that_is_not_configured_is_unavailable() -> None:
    assert names("cargo", Fake("n", "node")) == []
    assert names("make") == []


# attack 32: tool names as paths or with blanks.
@pytest.mark.parametrize(
    "name",
    [
        *("", "a/b", "/bin/sh", "..", ".", "-c", "a b", "a\n", "a;b", "$(id)"),
        *("a" * 65, "\u0430", "make\0"),
    ],
)
def test_what_is_no_name_is_no_tool(name: str) -> None:
    assert not is_tool_name(name)


fakes = st.builds(
    Fake,
    st.sampled_from("abcdef"),
    st.sampled_from(list(KINDS)),
    st.booleans(),
    st.none() | st.frozensets(st.sampled_from([*sorted(ALL_TOOLS), "jq"])),
)


@given(st.sampled_from([*sorted(ALL_TOOLS), "jq"]), st.lists(fakes, max_size=8))
def test_what_is_routed_runs_and_allows_it(tool: str, sidecars: list[Fake]) -> None:
    """Nothing is routed where it is not allowed; nothing allowed is forbidden."""
    able = [s for s in sidecars if s.is_running and tool in s.allow]
    try:
        found = candidates(tool, sidecars)
    except ToolRefusedError:
        found = ()
        assert not any(tool in sidecar.allow for sidecar in sidecars)
    assert sorted(map(id, found)) == sorted(map(id, able))
    places = [
        (OWNERS.get(tool) not in {None, s.kind}, list(KINDS).index(s.kind))
        for s in found
    ]
    assert places == sorted(places)
    assert toolchains_for(tool) or tool == "jq"
