"""ToolExec requests as they are checked: the order, tokens, versions, fields, ids."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.toolexec import requests
from protocol.toolexec.body import Head
from protocol.toolexec.requests import (
    Exec,
    Health,
    Notify,
    Refusal,
    Replay,
    Request,
    Signal,
)

TOKEN = b"0123456789abcdef0123456789abcdef"
AUTHORIZATION = b"authorization", b"Bearer " + TOKEN


def knows(pieces: Sequence[bytes]) -> bool:
    """Whether a token is among the pieces."""
    return TOKEN in pieces


def ask(
    body: bytes = b"tool=make",
    *,
    target: bytes = b"/exec",
    method: bytes = b"POST",
    auth: bytes | None = b"Bearer " + TOKEN,
    proto: bytes | None = b"2",
    version: bytes = b"1.1",
    more: Sequence[tuple[bytes, bytes]] = (),
) -> Request | Refusal:
    """Check one request."""
    headers = list(more)
    if auth is not None:
        headers.append((b"authorization", auth))
    if proto is not None:
        headers.append((b"x-aifo-proto", proto))
    return requests.check(Head(method, target, headers, version), body, knows)


def status(found: Request | Refusal) -> int:
    """Return the status of a refusal; 200 for a request."""
    return found.status if isinstance(found, Refusal) else 200


# The order of checks: path 404, method 405, token 401, version 426, fields 400.
@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (ask(b"", target=b"/", method=b"GET", auth=None, proto=None), 404),
        (ask(b"", method=b"GET", auth=None, proto=None), 405),
        (ask(b"", auth=None, proto=None), 401),
        (ask(b"", proto=None), 426),
        (ask(b""), 400),
        (ask(), 200),
    ],
)
# spec E13
def test_the_first_check_that_fails_answers(
    found: Request | Refusal, expected: int
) -> None:
    assert status(found) == expected


# spec E14
def test_refusals_are_those_of_the_table() -> None:
    assert ask(auth=None) == Refusal(401, b"unauthorized\n")
    assert ask(target=b"/exe") == Refusal(404, b"not found\n")
    assert ask(method=b"PUT") == Refusal(
        405, b"method not allowed\n", headers=((b"Allow", b"POST"),)
    )
    assert ask(proto=b"3") == Refusal(
        426,
        b"Unsupported shim protocol; expected 1 or 2\n",
        headers=((b"Upgrade", b"aifo-toolexec/2, aifo-toolexec/1"),),
    )
    assert ask(b"arg=x") == Refusal(400, b"bad request: no tool\n")
    assert requests.BUSY.headers == ((b"Retry-After", b"1"),)
    assert requests.not_permitted("rm\n").body.startswith(
        b"forbidden: tool 'rm?' is not permitted "
    )
    assert requests.id_in_use("a").body == b"exec id 'a' is in use\n"
    assert requests.host_fault("why").body == b"aifo-coder proxy error: why\n"
    assert (requests.output_gone(7).status, requests.TIMEOUT.exit_code) == (416, 124)
    assert all(
        refusal.status in requests.REASONS
        for refusal in (requests.HEAD_TOO_LARGE, requests.PAYLOAD_TOO_LARGE)
    )


# attack 34: tricks with the scheme. The last piece counts, whatever stands before it.
@pytest.mark.parametrize(
    ("value", "is_known"),
    [
        (b"Bearer T", True),
        (b"T", True),
        (b"Token T", True),
        (b"Digest x=T", True),
        (b'Digest x="T"', True),
        (b"Bearer 'T';", True),
        (b"Bearer T,", True),
        (b"bearer\tT", True),
        (b"Bearer T extra", False),
        (b"Bearer TT", False),
        (b"Bearer", False),
        (b"", False),
        (b"T=", True),
        (b"Basic dDp4", False),
    ],
)
# spec E15
def test_a_token_is_the_last_piece(value: bytes, is_known: bool) -> None:
    head = Head(b"POST", b"/exec", [(b"authorization", value)])
    assert (b"T" in head.tokens) is is_known
    found = requests.check(head, b"", lambda pieces: b"T" in pieces)
    assert (status(found) == 426) is is_known  # the token is good, the version missing


def test_any_of_several_authorizations_may_hold_the_token() -> None:
    more = [(b"authorization", b"Bearer nothing")]
    assert isinstance(ask(more=more), Exec)
    assert ask(more=more, auth=None) == requests.UNAUTHORIZED


# Each is looked up before it is known who asks.
def test_there_are_eight_authorizations_at_most() -> None:
    more = [(b"authorization", b"Bearer nothing")]
    assert isinstance(ask(more=more * (requests.MAX_AUTHORIZATIONS - 1)), Exec)
    for auth in (b"Bearer " + TOKEN, None):
        assert ask(auth=auth, more=more * (requests.MAX_AUTHORIZATIONS + 1)) == Refusal(
            400, b"bad request: more than 8 Authorization headers\n"
        )


# spec E13: a head alone decides all but the fields.
def test_what_a_head_decides_needs_no_body() -> None:
    good = [(b"authorization", TOKEN), (b"x-aifo-proto", b"2")]
    for method, target, headers, expected in (
        (b"POST", b"/exec", good, None),
        (b"GET", b"/exec/a?from=x", good, None),
        (b"POST", b"/signal", good, None),
        (b"POST", b"/notify", good, None),
        (b"GET", b"/healthz", [], Health()),
        (b"POST", b"/exe", good, requests.NOT_FOUND),
        (b"POST", b"/exec", good[1:], requests.UNAUTHORIZED),
        (b"POST", b"/exec", good[:1], requests.BAD_VERSION),
        (b"POST", b"/notify", good[:1], requests.BAD_NOTIFY_VERSION),
    ):
        head = Head(method, target, headers)
        assert requests.decide_by_head(head, knows) == expected
    refused = requests.decide_by_head(Head(b"PUT", b"/healthz", []), knows)
    assert isinstance(refused, Refusal)
    assert refused.status == 405


def test_a_version_is_looked_at_before_a_form_is() -> None:
    assert status(ask(b"&" * 5000, proto=None)) == 426
    assert status(ask(b"&" * 5000)) == 400


@pytest.mark.parametrize("proto", [b"", b"0", b"3", b"1.0", b"2 2", b"22", b"two"])
def test_another_version_is_426(proto: bytes) -> None:
    assert status(ask(proto=proto)) == 426
    assert status(ask(proto=proto, auth=None)) == 401  # both bad: the token first


# spec E16
def test_a_version_is_trimmed_and_stands_once() -> None:
    assert status(ask(proto=b" 1 ")) == 200
    assert status(ask(more=[(b"x-aifo-proto", b"2")])) == 426


def test_http_1_0_cannot_be_streamed_to() -> None:
    assert status(ask(version=b"1.0")) == 426
    assert status(ask(version=b"1.0", proto=b"1")) == 200
    get = ask(b"", target=b"/exec/a", method=b"GET", version=b"1.0")
    assert status(get) == 426


def test_a_request_says_what_to_run() -> None:
    found = ask(
        b"tool=make&cwd=%2Fworkspace%2Fa&arg=-j&arg=&arg=%c3%a9",
        proto=b"1",
        more=[
            (b"x-aifo-exec-id", b"a.b-c_1"),
            (b"x-aifo-detach", b"1"),
            (b"x-sandhost-fd", b"1"),
        ],
    )
    args = (b"-j", b"", b"\xc3\xa9")
    expected = Exec(
        1, "make", b"/workspace/a", args, "a.b-c_1", detach=True, as_fd=True
    )
    assert found == expected


# spec E12
def test_a_path_is_compared_without_case_and_query() -> None:
    assert isinstance(ask(target=b"/EXEC?arg=first", body=b"tool=a&arg=x"), Exec)
    assert ask(target=b"/exec?arg=1", body=b"tool=a&arg=2") == Exec(
        2, "a", b".", (b"1", b"2")
    )
    assert isinstance(ask(target=b"http://localhost/exec"), Exec)
    for target in (
        b"/exec/",
        b"/EXEC/?arg=1",
        b"/execs",
        b"//exec",
        b"/%65xec",
        b"exec",
    ):
        assert status(ask(target=target)) == 404, target
        assert status(replay(target)) == 404, target
    assert status(ask(target=b"/exec/id")) == 405


@pytest.mark.parametrize(
    "exec_id", [b"", b"../x", b"$(id)", b"a b", b"a/b", b"x" * 65, b"\xc3\xa9", b"a\n"]
)
def test_an_exec_id_is_a_plain_word(exec_id: bytes) -> None:
    assert not requests.is_exec_id(exec_id)
    found = ask(more=[(b"x-aifo-exec-id", exec_id)])
    assert found == Refusal(400, b"bad request: bad exec id\n")


def test_an_exec_id_stands_once() -> None:
    more = [(b"x-aifo-exec-id", b"a"), (b"x-aifo-exec-id", b"b")]
    assert status(ask(more=more)) == 400


def replay(target: bytes, **changes: bytes) -> Request | Refusal:
    """Check a GET."""
    return ask(b"", target=target, method=b"GET", **changes)  # type: ignore[arg-type]


def test_a_replay_begins_where_it_says() -> None:
    assert replay(b"/exec/Ab.1?from=17") == Replay("Ab.1", 17)
    assert replay(b"/exec/Ab.1") == Replay("Ab.1", 0)
    for bad in (b"-1", b"", b"x", b"1" * 19, b"1_0"):
        assert status(replay(b"/exec/a?from=" + bad)) == 400
    assert status(replay(b"/exec/..%2Fx")) == 400
    assert status(replay(b"/exec/a", proto=b"1")) == 426


@pytest.mark.parametrize(
    ("name", "signal"),
    [(b"", "TERM"), (b"&signal=int", "INT"), (b"&signal=SIGUSR1", "USR1")],
)
def test_a_signal_has_a_name_in_any_case(name: bytes, signal: str) -> None:
    assert ask(b"exec_id=a" + name, target=b"/signal") == Signal("a", signal)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"signal=INT", b"no exec_id"),
        (b"exec_id=", b"no exec_id"),
        (b"exec_id=..%2F", b"bad exec id"),
        (b"exec_id=a&signal=STOP", b"bad signal"),
        (b"exec_id=a&signal=9", b"bad signal"),
        (b"exec_id=a&signal=", b"bad signal"),
    ],
)
def test_a_bad_signal_says_what_is_bad(body: bytes, why: bytes) -> None:
    assert ask(body, target=b"/signal") == Refusal(400, b"bad request: %b\n" % why)


def test_a_signal_needs_a_version() -> None:
    assert status(ask(b"exec_id=a", target=b"/signal", proto=None)) == 426


def test_a_notification_is_spoken_in_version_2_only() -> None:
    assert ask(b"cmd=say&arg=hi", target=b"/notify") == Notify("say", (b"hi",))
    refused = ask(b"cmd=say", target=b"/notify", proto=b"1")
    assert status(refused) == 426
    assert isinstance(refused, Refusal)
    assert refused.body == b"unsupported notify protocol; expected 2\n"
    assert ask(b"", target=b"/notify") == Refusal(400, b"bad request: no cmd\n")


def test_health_needs_no_token() -> None:
    health = ask(b"", target=b"/healthz", method=b"GET", auth=None, proto=None)
    assert health == Health()


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ((b"--token", b"s3", b"x"), "--token *** x"),
        ((b"--api-key=s3", b"--KEY", b"s3"), "--api-key=*** --KEY ***"),
        ((b"Authorization: Bearer s3",), "Authorization: Bearer ***"),
        ((b"Bearer", b"s3"), "Bearer ***"),
        ((b"--password", b"--token"), "--password ***"),
        ((b"a\nb", b"--tokens", b"\xff"), "a?b --tokens ?"),
        ((b"-c", b"curl --token 's 3' x", b"y"), "-c curl --token '*** y"),
        ((b"-c", b"x --api-key=s3"), "-c x --api-key=***"),
        ((b"Authorization: Bearer", b"s3", b"x"), "Authorization: Bearer *** x"),
        ((b"--key", b"--key", b"s3", b"x"), "--key *** *** x"),
        ((b"--token", b"", b"s3", b"x"), "--token *** *** x"),
        ((b"--token\n", b"s3"), "--token? ***"),
        ((b'"--token"', b"s3"), '"--token" ***'),
        ((b"--token:s3", b"x"), "--token:*** x"),
        ((b"-H", b"X: bearer\ts3"), "-H X: bearer?***"),
        ((b"Bearer=s3", b"x"), "Bearer=*** x"),
        ((b"--header=Authorization: Bearer s3",), "--header=Authorization: Bearer ***"),
        ((b"--token-file", b"f", b"a--key", b"x"), "--token-file f a--key x"),
        ((b"a" * 32, b"T=" + b"0f" * 32 + b";", b"a" * 31), f"*** T=***; {'a' * 31}"),
    ],
)
# spec E34
def test_a_log_line_has_no_secrets(args: tuple[bytes, ...], line: str) -> None:
    assert requests.redact(args) == line


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_a_token_is_found_only_where_it_is(values: list[bytes]) -> None:
    head = Head(b"POST", b"/", [(b"authorization", value) for value in values])
    for piece in head.tokens:
        assert any(piece in value for value in values)


@given(st.binary(max_size=100), st.binary(max_size=200))
def test_any_request_is_answered(target: bytes, body: bytes) -> None:
    for where in (target, b"/exec", b"/exec/" + target, b"/signal", b"/notify"):
        for method in (b"POST", b"GET"):
            found = ask(body, target=where, method=method)
            if isinstance(found, Refusal):
                assert found.body.endswith(b"\n")
                assert found.body.count(b"\n") == 1
