"""The network of `run` and of a policy: what is refused, and where that is told."""

from pathlib import Path

import pytest

from tests.helpers.command import sandhost

PROBE = "import os, socket; print(socket.getaddrinfo('a.example', 443)[0][4][0][:3])"


# spec NET1, NET10, NET13, Forms: exit 2, one line, and nothing is started.
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--network", "a b"), "--network: cannot read the rule 'a b'"),
        (("--network", "a.example:0"), "--network: cannot read the rule 'a.example:0'"),
        (("--network", "10.5:80"), "--network: cannot read the rule '10.5:80'"),
        (
            ("--network", "none", "--network", "a.example"),
            "--network: 'none' stands alone",
        ),
        (("--network", "learn"), "--within: cannot learn without a bound"),
        (("--within", "a.example"), "--within: cannot use a bound"),
        (
            ("--network", "a.example:80", "--publish", "80"),
            "--publish: cannot publish '80': a rule grants port 80",
        ),
        (("--network", "host", "--publish", "80"), "--publish: cannot publish"),
        (
            ("--network", "a.example", "--upstream", "https://x"),
            "--upstream: cannot use 'https://x'",
        ),
        (("--proxy-env",), "--proxy-env: cannot use it: network = 'none'"),
    ],
)
@pytest.mark.parametrize("command", ["run", "pipeline"])
def test_a_faulty_network_is_told_with_its_option(
    tmp_path: Path, command: str, options: tuple[str, ...], said: str
) -> None:
    outcome = sandhost(command, *options, "--", "touch", "done", cwd=tmp_path)
    assert outcome.status == 2
    assert outcome.said(said)
    assert len(outcome.err.splitlines()) == 1
    assert not (tmp_path / "done").exists()


# spec NET14: as other limits that nothing keeps.
@pytest.mark.parametrize("network", ["none", "host"])
@pytest.mark.parametrize("limit", ["connections=5", "net_bytes=1M"])
def test_a_limit_of_a_network_without_rules_is_refused(
    network: str, limit: str
) -> None:
    words = ("--network", network, "--limit", limit)
    outcome = sandhost("run", *words, "--", "true")
    assert outcome.status == 125
    assert outcome.said(f"--limit: {limit.partition('=')[0]}: nothing keeps it")


# spec NET1, NET2, NET9, NET10, NET14: every fault of a policy with its path.
def test_check_config_tells_every_fault_of_a_network(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        """
[policy.a]
network = ["a.example", "b:443:1", "*.x.*"]
publish = ["on-close", "443"]
upstream = "ftp://x"
pool = "inner"
[policy.b]
network = "learn"
[policy.c]
network = ["a.example"]
sandbox = "none"
[policy.d]
network = ["a.example"]
sandbox = "bare"
[policy.e]
sandbox = "bare"
publish = ["8000"]
[policy.f]
network = "vpn"
[policy.g]
limits = { connections = 5 }
[sandbox.bare]
layers = ["landlock", "netns", "seccomp"]
"""
    )
    outcome = sandhost("check-config", str(config))
    assert outcome.status == 2
    for text in (
        "policy.a.network: cannot read the rule 'b:443:1'",
        "policy.a.network: cannot read the rule '*.x.*'",
        "policy.a.publish: cannot publish '443': a rule grants port 443",
        "policy.a.upstream: cannot use 'ftp://x'",
        "policy.a.pool: one of own, outer",
        "policy.b.within: cannot learn without a bound",
        "policy.c.network: sandbox 'none' makes no net namespace",
        "policy.d.network: cannot keep the rules: sandbox 'bare' lacks",
        "policy.e.publish: cannot keep the rules: sandbox 'bare' lacks",
        "policy.f.network: none, host, learn or a list of rules, not 'vpn'",
        "policy.g.limits.connections: nothing keeps it",
    ):
        assert text.encode() in outcome.err, text


# spec NET8: a policy leaves the judgement of addresses to a proxy, and is told so.
def test_check_config_tells_that_a_proxy_looks_names_up(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        "[policy.a]\nnetwork = ['a.example']\nupstream = 'http://proxy.example:3128'\n"
    )
    outcome = sandhost("check-config", str(config))
    assert outcome.status == 0
    text = "policy.a.upstream: warning: http://proxy.example:3128 looks names up"
    assert text in outcome.err.decode()
    assert sandhost("run", "--config", str(config), "--", "true").err == b""


# spec NET1: what a policy says is the default, and the command line goes before it.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "found"),
    [
        ((), b"198"),
        (("--network", "b.example"), b""),
        (("--network", "none"), b""),
        (("--network", "b.example", "--network", "a.example"), b"198"),
        (("--network", "learn", "--within", "*.example"), b"198"),
    ],
)
def test_the_command_line_goes_before_the_policy(
    tmp_path: Path, options: tuple[str, ...], found: bytes
) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[policy.run]\nnetwork = ['a.example']\nproxy_env = true\n")
    probe = PROBE.replace("443)", "443, socket.AF_INET)")
    outcome = sandhost(
        *("run", "--config", str(config), *options, "--", "python3", "-c", probe),
        cwd=tmp_path,
    )
    assert outcome.out.strip() == found
    assert (outcome.status == 0) == bool(found)
