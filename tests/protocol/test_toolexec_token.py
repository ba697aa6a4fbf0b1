"""Tokens that stand for less: what can be given up, and that nothing comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.toolexec import token as toolexec_token
from protocol.toolexec.token import (
    ALL,
    MAX_CAVEATS,
    MAX_TOKEN_BYTES,
    TokenRights,
    identity,
    mac,
    narrow_token,
    parse_narrowed,
)
from supervisor.toolexec.tokens import Tokens

TOKEN = "0123456789abcdef0123456789abcdef"  # noqa: S105 - of a test
TOOLS = st.lists(st.sampled_from(["make", "cc", "c++", "pkg-config", "go"]))


def rights_of(tokens: Tokens[str], token: str) -> TokenRights:
    """Return what a token stands for; it must be known."""
    found = tokens.find([token.encode()])
    assert found is not None
    owner, rights = found
    assert owner == "child"
    return rights


# spec A5, I8: each step leaves at most what there was.
@given(st.lists(st.tuples(st.none() | TOOLS, st.booleans()), min_size=1, max_size=4))
def test_rights_only_shrink(steps: list[tuple[list[str] | None, bool]]) -> None:
    tokens: Tokens[str] = Tokens()
    token = tokens.issue("child")
    tools: set[str] | None = None
    root = True
    scopes = [""]
    for number, (wanted, keeps_root) in enumerate(steps):
        token = narrow_token(token, f"n{number}", tools=wanted, root=keeps_root)
        if wanted is not None:
            tools = set(wanted) if tools is None else tools & set(wanted)
        root = root and keeps_root
        rights = rights_of(tokens, token)
        assert rights.tools == tools
        assert rights.root is root
        assert rights.is_narrowed
        scopes.append(rights.scope)
    assert len(set(scopes)) == len(scopes)  # each sees its own executions only


def test_two_that_are_narrowed_alike_see_nothing_of_each_other() -> None:
    tokens: Tokens[str] = Tokens()
    token = tokens.issue("child")
    one, two = (
        rights_of(tokens, narrow_token(token, name, tools=["cc"])) for name in "ab"
    )
    assert one.tools == two.tools
    assert one.scope != two.scope


# attack 38: nobody takes off what was put on, or makes a token out of a digest.
def test_a_part_that_was_changed_makes_it_unknown() -> None:
    tokens: Tokens[str] = Tokens()
    own = tokens.issue("child")
    token = narrow_token(own, "a", tools=["cc"], root=False)
    taken = parse_narrowed(token.encode())
    assert taken is not None
    name, (scope, tools, root), sum_ = taken
    forged = (
        f"{name}~{scope}~{tools}~{sum_}",
        f"{name}~{scope}~{sum_}",
        f"{name}~{sum_}",
        f"{name}~{scope}~tools:cc/make~{root}~{sum_}",
        f"{name}~{root}~{tools}~{scope}~{sum_}",
        f"{identity('other')}~{scope}~{tools}~{root}~{sum_}",
        f"{name}~{scope}~{tools}~{root}~{'0' * 64}",
        f"{name}~{scope}~{mac('', [scope])}",
        f"{name}~{scope}~{mac(name, [scope])}",
        token[:-1],
        token + "0",
        token.upper(),
    )
    for text in forged:
        assert tokens.find([text.encode()]) is None, text
    assert own not in token


def test_what_is_not_understood_stands_for_nothing() -> None:
    tokens: Tokens[str] = Tokens()
    own = tokens.issue("child")
    for caveats in (("id:a", "until:5"), ("tools:cc",), ("id:a", "noroot:"), ("",)):
        text = "~".join((identity(own), *caveats, mac(own, caveats)))
        assert tokens.find([text.encode()]) is None, caveats


def test_it_ends_with_the_token_it_was_made_from() -> None:
    tokens: Tokens[str] = Tokens()
    own = tokens.issue("child")
    token = narrow_token(own, "a")
    assert rights_of(tokens, token).root
    tokens.revoke(own)
    assert tokens.find([token.encode()]) is None


@pytest.mark.parametrize(
    "text", [b"", b"~", b"~~", b"a~b~c", b"\xff~", b"0" * 16 + b"~id:a~" + b"0" * 63]
)
def test_what_is_no_narrowed_token_is_not_taken_for_one(text: bytes) -> None:
    assert parse_narrowed(text) is None
    assert parse_narrowed(b"0" * 16 + b"~id:a~" * MAX_TOKEN_BYTES + b"0" * 64) is None


# A client without a token costs a look-up, however long its text is.
def test_nothing_is_computed_for_a_name_that_nobody_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens: Tokens[str] = Tokens()
    own = tokens.issue("child")
    computed: list[str] = []
    real = toolexec_token.mac

    def counted(key: str, caveats: tuple[str, ...]) -> str:
        computed.extend(caveats)
        return real(key, caveats)

    monkeypatch.setattr(toolexec_token, "mac", counted)
    for name, count in (
        ("0" * 16, 1),
        ("0" * 16, 4000),
        (toolexec_token.ID_DIGITS * "x", MAX_CAVEATS),
    ):
        text = "~".join((name, *[""] * count, "0" * 64))
        assert tokens.find([text.encode()] * 15) is None
    assert not computed
    name = identity(own)
    computed.clear()
    for count in (MAX_CAVEATS + 1, 4000):
        text = "~".join((name, *[""] * count, "0" * 64))
        assert tokens.find([text.encode()]) is None
    assert not computed


def test_a_token_has_so_many_caveats_and_no_more() -> None:
    tokens: Tokens[str] = Tokens()
    token = tokens.issue("child")
    for number in range(MAX_CAVEATS):
        token = narrow_token(token, f"n{number}")
        assert rights_of(tokens, token).is_narrowed
    assert tokens.find([narrow_token(token, "more").encode()]) is None


@given(st.binary(max_size=200))
def test_any_text_is_looked_at(text: bytes) -> None:
    tokens: Tokens[str] = Tokens()
    tokens.issue("child")
    assert tokens.find([text, b"~".join((b"0" * 16, text, b"0" * 64))]) is None


def test_the_childs_own_token_stands_for_everything() -> None:
    assert (ALL.tools, ALL.root, ALL.is_narrowed) == (None, True, False)
    assert identity(TOKEN) != TOKEN[:16]
