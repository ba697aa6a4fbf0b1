"""Each rule of the network, kept by a host of root and by one of a user (NET).

The user is a real one without rights, on a machine that gives user namespaces. Both hosts
stand in a world of their own, and are looked at from outside: by what their children get,
by the servers that are reached, by the control socket and the journal.
"""

import hashlib
import json
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.client import ControlError
from tests.helpers.command import TIMEOUT_S
from tests.helpers.rounds import LONG
from tests.system.attacks.test_unprivileged import nobodys_command
from tests.system.e2e import nameworld, ruleworld
from tests.system.e2e.networkhost import (
    BIG_BYTES,
    SAID,
    Command,
    NetworkHost,
    network_host,
    network_place,
)

pytestmark = pytest.mark.slow

SECRET = "tok-5Kd8+of/the/network"  # noqa: S105 - of the test
LIMIT_BYTES = 100_000
CLOSED = {
    "chain.test": "private-address",
    "mixed.test": "private-address",
    "private.test": "private-address",
    "mapped.test": "private-address",
    "meta.test": "private-address",
    "loop.test": "own-address",
    "own.test": "own-address",
}
V6_RULE = f"[2001:DB8:1:0:0::5]:{ruleworld.DIGEST}"
RULES = [
    "ok.test:80,443,5432,7,9",
    *(f"{name}:80" for name in CLOSED),
    *(f"{name}.test:80" for name in ("late", "release", "never", "many", "other")),
    V6_RULE,
]
POLICIES = {
    "rules": f"network = {RULES}\npublish = ['8000']\ncredentials = ['web']",
    "changed": "network = ['ok.test:9']",
    "private": "network = ['private.test:7@private']",
    "learn": "network = 'learn'\nwithin = ['*.test:80,443']",
    "small": "network = ['ok.test:80,9']\n"
    f"limits = {{ net_bytes = {LIMIT_BYTES}, connections = 2 }}",
    "silent": "network = ['ok.test:80']\n"
    f"upstream = 'http://{nameworld.PUBLIC}:{ruleworld.SILENT}'",
    "closed": f"network = ['ok.test:80']\nupstream = 'http://{nameworld.PUBLIC}:81'",
    "open": "network = ['ok.test:80,7', 'private.test:80']\nsandbox = 'open'\n"
    f"expose = ['{sysconfig.get_path('purelib')}']",
}
"""Of a child each. A nested one is in a sandbox that allows mounts."""
HEAD = """
[host]
runtime_dir = "{place}/home/run"
state_dir = "{place}/home/state"
control = "{place}/home/control"
grace = "1s"
[credential.web]
host = "ok.test"
header = "Authorization: Bearer {{file}}"
file = "{place}/home/key"
ca_file = "{place}/tls-made.pem"
[sandbox.open]
layers = ["uid", "userns", "mountns", "netns"]
"""


@pytest.fixture(scope="module", params=["root", "user"])
def each_host(request: pytest.FixtureRequest) -> Iterator[NetworkHost]:
    """A host of root, and one of a user, whose children do what they are told."""
    with network_place() as place:
        command = Command()
        if request.param == "user":
            command = command_of_a_user(place)
        (place / "home" / "key").write_text(f"{SECRET}\n")
        (place / "home" / "key").chmod(0o600)
        os.chown(place / "home" / "key", *owner(place / "home"))
        tables = "".join(
            f"[policy.{name}]\n{keys}\n[child.{name}]\npolicy = '{name}'\n"
            f"command = ['python3', 'prober.py', '{name}']\n"
            for name, keys in POLICIES.items()
        )
        (place / "c.toml").write_text(HEAD.format(place=place) + tables)
        words = ("serve", "--config", str(place / "c.toml"))
        with network_host(place, command, tuple(POLICIES), *words) as host:
            yield host


def command_of_a_user(place: Path) -> Command:
    """Return how a user without rights starts a host; `home` is that user's."""
    words, env = nobodys_command(place / "home")
    inner = str(Path(words[-1]).with_name("sandhost"))
    return Command((*words, "-m", "supervisor"), env, inner)


def owner(path: Path) -> tuple[int, int]:
    """Return the user and the group of a file."""
    status = path.stat()
    return status.st_uid, status.st_gid


# spec NET1: rules are kept as written; a faulty one is refused, and nothing changed.
def test_rules_are_read_and_told(each_host: NetworkHost) -> None:
    found = each_host.client.network("rules")
    assert found.rules[: len(RULES)] == tuple(RULES)
    with pytest.raises(ControlError, match=r"cannot read the rule '10\.5:80'"):
        each_host.client.network("rules", allow=["10.5:80"])
    assert each_host.client.network("rules").rules == found.rules


# spec NET2: a nested child has a part of its parent's, and its host decides once more.
# attack 62
def test_a_nested_child_has_a_part_of_its_parents(each_host: NetworkHost) -> None:
    relay = (each_host.command.inner, "relay", "--network")
    words = (*relay, "other.test:80", "--", "true")
    status, said = each_host.do("open", f"shell(*{words})")
    assert status == 2
    assert "the parent has no rule" in said
    nested = ("ok.test:80", "--network", "private.test:80", "--", "python3")
    each_host.do("open", f"start(*{(*relay, *nested, 'prober.py', 'nested')})")
    each_host.wait_for("nested")
    assert each_host.do("nested", "get('ok.test')") == SAID
    assert each_host.do("nested", "get('ok.test', 7)") == "ECONNREFUSED"
    assert each_host.do("nested", "get('private.test')") == "reset"
    assert each_host.refused("open")["private.test", 80] == "private-address"
    each_host.end("nested")


# spec NET3: one closed address refuses the name; `@private` opens private ones.
# attack 57
def test_closed_addresses_are_never_reached_by_a_name(each_host: NetworkHost) -> None:
    for name in CLOSED:
        assert each_host.do("rules", f"get({name!r})") == "reset", name
    refused = each_host.refused("rules")
    assert {name: refused[name, 80] for name in CLOSED} == CLOSED
    digest = each_host.do("private", "send('private.test', 7, b'x')")
    assert digest.decode() == hashlib.sha256(b"x").hexdigest()


# spec NET4: what is in the child's namespace, and how its programs find it.
def test_a_child_has_its_own_names_and_no_other_way(each_host: NetworkHost) -> None:
    lines = each_host.do("rules", "text_of('/etc/resolv.conf')").splitlines()
    assert "nameserver 127.0.0.1" in lines
    assert "many.test" not in each_host.do("rules", "text_of('/etc/hosts')")
    user = "__import__('pwd').getpwuid(__import__('os').getuid()).pw_name"
    assert each_host.do("rules", user)
    assert each_host.do("rules", f"get({nameworld.PUBLIC!r})") == "ENETUNREACH"
    assert each_host.do("rules", f"get({ruleworld.PUBLIC_V6!r})") == "reset"
    assert each_host.do("rules", "serve(5432, b'')") == "EADDRINUSE"
    assert each_host.do("rules", "get('127.0.0.1')") == "reset"


# spec NET5: names have addresses of the pool, and no question leaves for others.
# attack 60
def test_the_host_answers_for_names_itself(each_host: NetworkHost) -> None:
    found = each_host.do("rules", "addresses('ok.test')")
    assert [text[:7] for text in found] == ["198.18.", "fd5a:6e"]
    assert each_host.do("rules", "addresses('OK.test')") == found
    assert each_host.do("rules", "addresses('data.out.test')") == "no name"
    assert each_host.do("rules", "get('198.18.77.7')") == "reset"
    refused = each_host.refused("rules")
    assert refused["data.out.test", None] == "no-rule"
    assert refused["198.18.77.7", 80] == "no-name"
    assert "data.out.test" not in each_host.asked()


# spec NET6: bytes reach a server outside, and its own come back; ends are as they were.
# attack 61
def test_bytes_go_both_ways_and_end_as_they_do_outside(each_host: NetworkHost) -> None:
    data = "b'outward' * 100_000"
    before = each_host.client.network("rules")
    digest = each_host.do("rules", f"send('ok.test', 7, {data})")
    assert digest.decode() == hashlib.sha256(b"outward" * 100_000).hexdigest()
    size = "len(get('ok.test', path='/big'))"
    assert each_host.do("rules", size) == BIG_BYTES
    found = each_host.client.network("rules")
    assert found.bytes_out >= before.bytes_out + 700_000
    assert found.bytes_in >= before.bytes_in + BIG_BYTES
    assert each_host.do("rules", "hold('cut', 'ok.test', 9, 4)") == b"half"
    assert each_host.do("rules", "held('cut', b'.')") == "reset"
    assert each_host.do("rules", "get('ok.test', 81)") == "ECONNREFUSED"


# spec NET7: the name in the ClientHello is the rule's, or nothing is dialled.
def test_tls_is_for_the_granted_name(each_host: NetworkHost) -> None:
    assert each_host.do("rules", "get_by_tls('ok.test', 'ok.test')") == SAID
    for tried, reason in {
        "get_by_tls('ok.test', 'else.test')": "tls-other-name",
        "get_by_tls('ok.test', None)": "tls-no-sni",
        "get('ok.test', 443)": "tls-no-hello",
    }.items():
        assert each_host.do("rules", tried) == "reset"
        assert each_host.refused("rules")["ok.test", 443] == reason


# spec NET8: the proxy of the namespace keeps the same rules, and tells of them.
def test_programs_that_use_a_proxy_get_the_same(each_host: NetworkHost) -> None:
    def ask(request: bytes) -> bytes:
        found: bytes = each_host.do("rules", f"send('127.0.0.1', 3128, {request!r})")
        return found

    host = b" HTTP/1.1\r\nHost: ok.test\r\nConnection: close\r\n\r\n"
    for name, status in ((b"ok.test", b"200"), (b"out.test", b"403")):
        head, _, rest = ask(b"CONNECT %b:80%b" % (name, host)).partition(b"\r\n\r\n")
        assert head.split()[1] == status
        if status == b"403":
            told = json.loads(rest)
            assert (told["error"], told["rule"]) == ("policy_denied", "out.test:80")
    tunnel = b"CONNECT ok.test:80%bGET /said%b" % (host, host)
    assert ask(tunnel).endswith(SAID.encode())
    assert ask(b"GET http://ok.test/said" + host).endswith(SAID.encode())
    socks = b"\5\1\0\5\1\0\3\7ok.test\0PGET /said" + host
    assert ask(socks).endswith(SAID.encode())
    variables = each_host.do("rules", "dict(__import__('os').environ)")
    assert "http_proxy" not in variables


# spec NET9: a child's own servers stand on any port; without a namespace it is refused.
def test_rules_are_kept_in_a_namespace_or_refused(each_host: NetworkHost) -> None:
    port = each_host.do("rules", "serve(0, b'own')")
    assert each_host.do("rules", f"send('127.0.0.1', {port})") == b"own"
    words = ("run", "--sandbox", "none", "--network", "ok.test", "--", "touch", "done")
    home = each_host.place / "home"
    done = subprocess.run(
        [*each_host.command.words, *words],
        capture_output=True, check=False, timeout=TIMEOUT_S,
        env=dict(each_host.command.env), cwd=home,
    )  # fmt: skip
    assert done.returncode == 125, done.stderr
    assert b"sandbox 'none' makes no net namespace" in done.stderr
    assert not (home / "done").exists()


# spec NET10: a published port is reached at the host's 127.0.0.1.
def test_a_port_of_a_child_is_published(each_host: NetworkHost) -> None:
    assert each_host.do("rules", "serve(8000, b'from the child')") == 8000
    (row,) = each_host.client.network("rules").published
    assert row.port == 8000
    port = row.address.removeprefix("127.0.0.1:")
    read = f"import socket; print(socket.create_connection(('127.0.0.1', {port})).recv(99))"
    enter = ("nsenter", "--net", "--target", str(each_host.world))
    done = subprocess.run(
        [*enter, "python3", "-c", read], capture_output=True, check=True, text=True
    )
    assert done.stdout.strip() == "b'from the child'"


# spec NET11: a refusal is told once a minute; 256 names have rows, and the others one.
def test_many_refusals_fill_no_journal(each_host: NetworkHost) -> None:
    names = "[*range(260), 1, 259]"
    tries = f"{{value_of('addresses(\"out%d.example\")' % name) for name in {names}}}"
    assert each_host.do("learn", tries) == {"no name"}
    rows = each_host.client.network("learn").refused
    assert len(rows) <= 257
    counts = {row.name: row.count for row in rows}
    assert counts["(others)"] >= 5 * counts["out2.example"]
    assert counts["out1.example"] == 2 * counts["out2.example"]
    assert len(each_host.events("learn", "network.refused")) == len(rows)


# spec NET12: the next connection obeys a change; `cut` resets what is not allowed now.
# attack 62
def test_rules_of_a_running_child_are_changed(each_host: NetworkHost) -> None:
    change = each_host.client.network
    public = f"{nameworld.PUBLIC}:7"
    assert each_host.do("changed", "get('ok.test', 7)") == "ECONNREFUSED"
    assert each_host.do("changed", f"send({nameworld.PUBLIC!r}, 7)") == "ENETUNREACH"
    change("changed", allow=["ok.test:7", public])
    digest = hashlib.sha256().hexdigest().encode()
    assert each_host.do("changed", "send('ok.test', 7)") == digest
    assert each_host.do("changed", f"send({nameworld.PUBLIC!r}, 7)") == digest
    assert each_host.do("changed", "hold('kept', 'ok.test', 9, 4)") == b"half"
    change("changed", deny=["ok.test:7"])
    assert each_host.do("changed", "get('ok.test', 7)") == "reset"
    assert each_host.refused("changed")["ok.test", 7] == "refused-by-rule"
    found = change("changed", deny=["ok.test:9"], cut=True)
    assert found.rules == (public, "!ok.test:7", "!ok.test:9")
    assert each_host.do("changed", "held('kept')") == "reset"
    assert each_host.do("changed", "get('ok.test')") == "no name"
    events = each_host.events("changed", "network.changed")
    assert [(row["allow"], row["deny"], row["cut"]) for row in events] == [
        (["ok.test:7", public], [], False),
        ([], ["ok.test:7"], False),
        ([], ["ok.test:9"], True),
    ]


# spec NET13: what is used within the bound is allowed, and printed as rules.
def test_what_a_child_uses_is_learned(each_host: NetworkHost) -> None:
    assert each_host.do("learn", "get('ok.test')") == SAID
    assert each_host.do("learn", "get_by_tls('ok.test', 'ok.test')") == SAID
    assert each_host.do("learn", "get('ok.example')") == "no name"
    assert each_host.client.learned_rules("learn") == ["ok.test:80,443"]


# spec NET14: over a limit: reset, with the reason.
def test_bytes_and_connections_are_limited(each_host: NetworkHost) -> None:
    for key in ("first", "second"):
        assert each_host.do("small", f"hold({key!r}, 'ok.test', 9, 4)") == b"half"
    assert each_host.do("small", "get('ok.test')") == "reset"
    assert each_host.refused("small")["ok.test", 80] == "limit-connections"
    for key in ("first", "second"):
        assert each_host.do("small", f"held({key!r}, b'.')") == "reset"
    assert each_host.do("small", "get('ok.test', path='/big')") == "reset"
    assert each_host.refused("small")["ok.test", 80] == "limit-net_bytes"
    found = each_host.client.network("small")
    assert 0 < found.bytes_in + found.bytes_out <= LIMIT_BYTES


# spec NET15: the host adds the secret, and the child never has it.
# attack 24
def test_a_secret_is_added_by_the_host(each_host: NetworkHost) -> None:
    body = each_host.do("rules", "get('ok.test.sandhost', path='/echo')")
    digest = hashlib.sha256(f"Bearer {SECRET}".encode()).hexdigest()
    assert body == f"{digest}\nok.test Bearer [redacted]\n"
    key = str(each_host.place / "home" / "key")
    assert each_host.do("rules", f"text_of({key!r})") in {"EACCES", "ENOENT"}
    assert each_host.do("changed", "get('ok.test.sandhost')") == "no name"


# spec NET11: an address stands in its canonical form, with its bytes.
def test_an_address_of_a_rule_has_figures(each_host: NetworkHost) -> None:
    form = "2001:db8:1:0::5"
    digest = each_host.do("rules", f"send({form!r}, 7, b'12345')")
    assert digest.decode() == hashlib.sha256(b"12345").hexdigest()
    rows = each_host.client.network("rules").names
    (row,) = (row for row in rows if row.name == ruleworld.PUBLIC_V6)
    found = (row.port, row.connections, row.bytes_in, row.bytes_out)
    assert found == (7, 1, len(digest), 5)


# spec NET6: what a name server does or leaves is told, and holds up no other child.
def test_odd_name_servers_are_told(each_host: NetworkHost) -> None:
    before = each_host.resident_bytes
    assert each_host.do("rules", "get('many.test')") == "reset"
    assert each_host.do("rules", "get('other.test')") == "reset"
    assert each_host.failed("rules")["many.test"] == "EMSGSIZE"
    assert each_host.refused("rules")["other.test", 80] == "no-such-name"
    assert each_host.resident_bytes < before + 32 * 1024 * 1024
    for name in ("never", "late"):
        each_host.do("rules", f"begin({name!r}, 'get(\"{name}.test\")')")
    each_host.wait_for_questions("never.test", "late.test")
    assert each_host.do("rules", "get('ok.test')") == SAID
    assert each_host.do("open", "get('ok.test')") == SAID
    assert "late.test" not in {
        row.name for row in each_host.client.network("rules").names
    }
    assert each_host.do("rules", "get('release.test')") == "reset"
    assert each_host.do("rules", "end('late')") == SAID


# spec NET8: a proxy of the host's that refuses, or says nothing, is told.
def test_an_upstream_that_does_not_answer_is_told(each_host: NetworkHost) -> None:
    assert each_host.do("closed", "get('ok.test')") == "reset"
    assert each_host.failed("closed") == {"ok.test": "ECONNREFUSED"}
    each_host.do("silent", "begin('silent', 'get(\"ok.test\")')")
    assert each_host.do("closed", "get('ok.test')") == "reset"
    assert each_host.do("rules", "get('ok.test')") == SAID


# spec NET6, NET8: a host waits 30 s for a name server or a proxy, and says so.
@pytest.mark.chaos
@pytest.mark.skipif(not LONG, reason="for the long form (CHAOS_ROUNDS=10000)")
def test_silence_outside_ends_a_connection(each_host: NetworkHost) -> None:
    tries = {"rules": "never.test", "silent": "ok.test"}
    for child, name in tries.items():
        each_host.do(child, f"begin('waits', 'get(\"{name}\")')")
    for child, name in tries.items():
        assert each_host.do(child, "end('waits')") == "reset"
        assert each_host.failed(child)[name] == "ETIMEDOUT"
