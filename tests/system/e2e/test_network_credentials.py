"""A secret that the host adds.

The child's requests have it, and the child never has it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers import networkworld
from tests.helpers.certificates import certificate
from tests.helpers.command import ENVIRONMENT, PROGRAMS, SANDHOST, TIMEOUT_S, sandhost

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = "tok-7Hq2+e2e/credential"  # noqa: S105 - of the test
SENT = hashlib.sha256(f"Bearer {SECRET}".encode()).hexdigest()
URL = "http://web.test.sandhost/echo"

CONFIG = """
[credential.web]
host = "web.test"
header = "Authorization: Bearer {{file}}"
file = "{place}/key"
ca_file = "{place}/tls-made.pem"
[policy.run]
network = ["web.test:80"]
"""

SEARCH = """
import glob, json, os, sys
found = {**os.environ, "argv": " ".join(sys.argv)}
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    try:
        found[path] = open(path, errors="replace").read()
    except OSError:
        pass
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A host's part of a credential, and a world of its own with the server."""
    if os.geteuid() or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("a world of its own needs root, unshare(1) and ip(8)")
    if shutil.which("curl", path=PROGRAMS) is None:
        pytest.skip("curl is not installed")
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        made.chmod(0o755)
        certificate(made, "web.test")
        (made / "said").write_text("from the web\n")
        (made / "key").write_text(f"{SECRET}\n")
        (made / "key").chmod(0o600)
        (made / "c.toml").write_text(CONFIG.format(place=made))
        (made / "search.py").write_text(SEARCH)
        (made / "inner.sh").write_text(f"curl -sS {URL}")
        for file in ("said", "c.toml", "search.py", "inner.sh", "tls-made.pem"):
            (made / file).chmod(0o644)
        yield made


def run(place: Path, *command: str, options: tuple[str, ...]) -> tuple[int, str, str]:
    """Run a child in the world; return its status, and what was written."""
    world = ("unshare", "--net", "--mount", sys.executable, networkworld.__file__)
    start = (SANDHOST, "run", "--config", str(place / "c.toml"), *options, "--")
    done = subprocess.run(
        [*world, str(place), str(place / "tls.pem"), *start, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=ENVIRONMENT,
        cwd=place,
    )
    assert SECRET not in done.stdout + done.stderr
    return done.returncode, done.stdout, done.stderr


# spec NET15: the child speaks plain HTTP, the host adds the header and dials by TLS; what
# the server echoes of the secret is blotted out.
@pytest.mark.slow
def test_a_child_uses_a_secret_that_it_does_not_have(place: Path) -> None:
    journal = place / "journal"
    options = ("--credential", "web", "--journal", str(journal))
    header = ("-H", "Authorization: Bearer own", "--compressed")
    status, out, err = run(place, "curl", "-sS", *header, URL, options=options)
    assert status == 0, err
    assert out == f"{SENT}\nweb.test Bearer [redacted]\n"
    assert SECRET not in journal.read_text()


# spec NET15, attack 24, I10: in no environment, command line or file that it can read.
@pytest.mark.slow
def test_a_child_finds_the_secret_nowhere(place: Path) -> None:
    options = ("--credential", "web", "--top-level", "--read", str(place))
    _, out, err = run(place, "python3", str(place / "search.py"), options=options)
    found = json.loads(out)
    assert found["FSPROXY_NETWORK"].split() == ["web.test:80", "web.test.sandhost:80"]
    key = str(place / "key")
    status, out, err = run(place, "cat", key, options=options)
    assert (status, out) == (1, ""), err
    status, out, err = run(place, SANDHOST, "fs", "cat", key, options=options)
    assert (status, out) == (1, ""), err


# spec NET15: a child that was not granted it has no such name, and its file is closed to it.
@pytest.mark.slow
def test_a_child_without_the_credential_does_not_reach_it(place: Path) -> None:
    status, out, err = run(place, "curl", "-sS", URL, options=())
    assert (status, out) == (6, ""), err
    key = str(place / "key")
    options = ("--top-level", "--read", str(place), "--network", "none")
    status, out, err = run(place, SANDHOST, "fs", "cat", key, options=options)
    assert (status, out) == (1, ""), err


# spec NET15: without any other network, and named by the policy.
@pytest.mark.slow
def test_a_policy_grants_a_credential_alone(place: Path) -> None:
    config = place / "alone.toml"
    text = CONFIG.format(place=place).replace('network = ["web.test:80"]', "")
    config.write_text(f'{text}credentials = ["web"]\n')
    options = ("--config", str(config))
    status, out, err = run(place, "curl", "-sS", URL, options=options)
    assert (status, out) == (0, f"{SENT}\nweb.test Bearer [redacted]\n"), err
    status, out, _ = run(place, "curl", "-sS", "http://web.test/said", options=options)
    assert (status, out) == (6, "")


# spec NET8, NET15: a program that was told of the proxy goes past it to a credential.
@pytest.mark.slow
def test_proxy_variables_leave_a_credential_out(place: Path) -> None:
    options = ("--credential", "web", "--proxy-env")
    script = f"curl -sS {URL}; curl -sS http://web.test/said"
    status, out, err = run(place, "sh", "-c", script, options=options)
    assert status == 0, err
    assert out == f"{SENT}\nweb.test Bearer [redacted]\nfrom the web\n"


# spec NET2, NET15: a nested child has it if it asks for it, and no other one has.
@pytest.mark.slow
def test_a_nested_child_asks_for_the_credential_by_its_name(place: Path) -> None:
    config = place / "open.toml"
    text = CONFIG.format(place=place)
    layers = 'layers = ["uid", "userns", "mountns", "netns"]'
    config.write_text(f'{text}sandbox = "open"\n[sandbox.open]\n{layers}\n')
    options = ("--config", str(config), "--credential", "web")
    for rule, seen in (("web.test.sandhost:80", f"{SENT}\n"), ("web.test:80", "")):
        nested = (SANDHOST, "relay", "--network", rule, "--", "sh", "inner.sh")
        _, out, err = run(place, *nested, options=options)
        assert out.startswith(seen), err
        assert bool(out) == bool(seen), err


# spec NET15, face: every fault of a credential with its path, and nothing of the secret.
def test_check_config_tells_every_fault_of_a_credential(tmp_path: Path) -> None:
    files = {"good": SECRET, "open": SECRET, "empty": "", "two": f"{SECRET}\nmore"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o644 if name == "open" else 0o600)
    config = tmp_path / "c.toml"
    config.write_text(
        f"""
[credential.a]
host = "10.1.0.5"
header = "Authorization: {{file}} {{file}}"
file = "{tmp_path}/absent"
[credential.b]
host = "*.example.com"
header = "Authorization: Bearer"
file = "{tmp_path}/empty"
[credential.c]
host = "api.example.com"
header = "X: {{file}}\\r\\nHost: x"
file = "{tmp_path}/open"
ca_file = "{tmp_path}/good"
[credential.d]
host = "api.example.com"
header = "Host: {{file}}"
file = "{tmp_path}/two"
ca_file = "{tmp_path}/absent"
[credential.e]
hosts = "x"
[credential.good]
host = "api.example.com"
header = "X-Key: {{file}}"
file = "{tmp_path}/good"
[policy.a]
credentials = ["unknown", "good", "c"]
[policy.b]
credentials = ["good"]
network = "host"
[policy.c]
credentials = ["good"]
sandbox = "none"
[policy.d]
credentials = ["good"]
sandbox = "bare"
[policy.e]
credentials = "good"
[policy.f]
network = ["api.example.com.sandhost:80"]
[policy.g]
credentials = ["good"]
publish = ["80"]
[sandbox.bare]
layers = ["landlock", "netns", "seccomp"]
"""
    )
    outcome = sandhost("check-config", str(config))
    assert outcome.status == 2
    for text in (
        "credential.a.host: cannot send a secret to '10.1.0.5': it is an address",
        "credential.a.header: cannot use the header 'Authorization: {file} {file}'",
        f"credential.a.file: cannot use key file '{tmp_path}/absent': No such file",
        "credential.b.host: cannot send a secret to '*.example.com': it stands for many",
        "credential.b.header: cannot use the header 'Authorization: Bearer': the secret",
        f"credential.b.file: cannot use key file '{tmp_path}/empty': it holds no key",
        "credential.c.header: cannot use the header 'X: {file}??Host: x': its value has",
        f"credential.c.file: cannot use key file '{tmp_path}/open': other users may read",
        f"credential.c.ca_file: cannot use '{tmp_path}/good': it holds no certificate",
        "credential.d.header: cannot use the header 'Host: {file}': the host writes",
        f"credential.d.file: cannot use key file '{tmp_path}/two': it holds more than one",
        f"credential.d.ca_file: cannot use '{tmp_path}/absent': No such file",
        "credential.e.hosts: unknown key; known are host, header, file, ca_file",
        "credential.e.file: is missing",
        "policy.a.credentials: there is no credential 'unknown'; there are: a, b, c, d",
        "policy.a.credentials: 'good' and 'c' are both for api.example.com; leave one",
        "policy.b.credentials: cannot use them: a child with network = 'host' has no own",
        "policy.c.credentials: sandbox 'none' makes no net namespace",
        "policy.d.credentials: cannot keep the rules: sandbox 'bare' lacks the layer",
        "policy.e.credentials: expected an array, got a string",
        "policy.f.network: cannot keep the rule 'api.example.com.sandhost:80': it is for",
        "policy.g.publish: cannot publish '80'",
    ):
        assert text.encode() in outcome.err, (text, outcome.err.decode())
    assert SECRET.encode() not in outcome.err


# spec NET15: exit 2, one line, and nothing is started.
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--credential", "web"), "--credential: there is no credential 'web'"),
        (
            ("--config", "c.toml", "--credential", "other"),
            "--credential: there is no credential 'other'; there are: web",
        ),
        (
            ("--config", "c.toml", "--credential", "web", "--credential", "web"),
            "--credential: 'web' is named twice",
        ),
        (
            ("--config", "c.toml", "--credential", "web", "--network", "host"),
            "--credential: cannot use them",
        ),
        (
            ("--config", "c.toml", "--credential", "web", "--publish", "80"),
            "--publish: cannot publish '80'",
        ),
    ],
)
def test_a_faulty_option_is_told(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    key = tmp_path / "key"
    key.write_text(SECRET)
    key.chmod(0o600)
    text = CONFIG.format(place=tmp_path).replace(
        f'ca_file = "{tmp_path}/tls-made.pem"', ""
    )
    (tmp_path / "c.toml").write_text(text)
    outcome = sandhost("run", *options, "--", "touch", "done", cwd=tmp_path)
    assert outcome.status == 2
    assert outcome.said(said)
    assert not (tmp_path / "done").exists()


# spec NET9, NET15: where there is no net namespace the start is refused with the reason.
def test_a_child_without_a_namespace_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(SECRET)
    key.chmod(0o600)
    text = CONFIG.format(place=tmp_path).replace(
        f'ca_file = "{tmp_path}/tls-made.pem"', ""
    )
    (tmp_path / "c.toml").write_text(text.replace('network = ["web.test:80"]', ""))
    words = ("--config", "c.toml", "--credential", "web", "--sandbox", "none")
    outcome = sandhost("run", *words, "--", "touch", "done", cwd=tmp_path)
    assert outcome.status == 125
    assert outcome.said("--credential: sandbox 'none' makes no net namespace")
    assert not (tmp_path / "done").exists()
