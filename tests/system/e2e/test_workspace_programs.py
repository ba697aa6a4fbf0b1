"""Common programs in a workspace in the default sandbox: pip, npm, git, cargo."""

import base64
import hashlib
import io
import json
import os
import pwd
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.helpers.command import Outcome, sandhost

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

IS_ROOT = os.geteuid() == 0

SYSTEM = "/usr/local/bin:/usr/bin:/bin"

IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "A"), ("EMAIL", "a@example.org"))
}


def needs(*programs: str) -> None:
    """Skip a test whose programs are not installed where everybody finds them."""
    for name in programs:
        if shutil.which(name, path=SYSTEM) is None:
            pytest.skip(f"{name} is not installed in {SYSTEM}")


class Work:
    """A base with a git repository."""

    def __init__(self, top: Path) -> None:
        self.base = top / "repo"
        self.state = top / "state"
        (self.base / "src").mkdir(parents=True)
        (self.base / "a.txt").write_text("hello\n")
        (self.base / "src" / "b.txt").write_text("b\n")

    def run(self, script: str, *options: str, command: tuple[str, ...] = ()) -> Outcome:
        """Run a shell script in the workspace, which ends at the first fault."""
        where = ("--state-dir", str(self.state), "--workspace", str(self.base))
        quiet = ("--env", f"PATH={SYSTEM}", "--log-level", "error")
        words = command or ("sh", "-ec", script)
        return sandhost("run", *where, *quiet, *options, "--", *words)

    def says(self, script: str, *options: str) -> str:
        """Return what it prints; it has to end well, and the base stays as it is."""
        before = sorted(map(str, self.base.rglob("*")))
        outcome = self.run(script, *options)
        assert outcome.status == 0, outcome
        assert sorted(map(str, self.base.rglob("*"))) == before
        return outcome.out.decode()


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path)


def make_wheel(where: Path) -> str:
    """Make a wheel of a module in a directory; return the wheel's name."""
    info = "greeting-1.0.dist-info"
    files = {
        "greeting.py": "def main(): print('greetings')\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n",
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
        f"{info}/entry_points.txt": "[console_scripts]\ngreet = greeting:main\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    where.mkdir(exist_ok=True)
    name = "greeting-1.0-py3-none-any.whl"
    with zipfile.ZipFile(where / name, "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)
    return name


# spec HM4, HM2
@pytest.mark.nobody
def test_programs_know_their_user(work: Work) -> None:
    needs("python3", "node")
    script = (
        "whoami; python3 -c 'import getpass; print(getpass.getuser())';"
        " node -e 'console.log(require(\"os\").userInfo().username)'"
    )
    assert set(work.says(script).split()) == {"child"}


# spec HM4
@pytest.mark.nobody
def test_a_venv_is_made_and_pip_installs_from_a_directory(work: Work) -> None:
    needs("python3")
    make_wheel(work.base / "wheels")
    script = (
        "python3 -m venv v;"
        " v/bin/pip install -q --no-index --find-links wheels greeting; v/bin/greet"
    )
    assert work.says(script) == "greetings\n"


@contextmanager
def served(where: Path) -> Iterator[int]:
    """Serve a directory by HTTP on this machine's loopback."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing."""

    handler = partial(Quiet, directory=str(where))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


# spec HM4
def test_pip_installs_from_an_index_that_the_network_reaches(
    work: Work, tmp_path: Path
) -> None:
    needs("python3")
    simple = tmp_path / "index" / "simple"
    (simple / "greeting").mkdir(parents=True)
    name = make_wheel(simple / "greeting")
    (simple / "greeting" / "index.html").write_text(f"<a href='{name}'>{name}</a>")
    with served(tmp_path / "index") as port:
        script = (
            "python3 -m venv v;"
            f" v/bin/pip install -q --index-url http://127.0.0.1:{port}/simple greeting;"
            " v/bin/greet"
        )
        assert work.says(script, "--network", "host") == "greetings\n"


# spec HM4
@pytest.mark.nobody
def test_npm_installs_from_its_cache_and_runs_what_it_installed(work: Work) -> None:
    needs("node", "npm")
    package = {"name": "greet", "version": "1.0.0", "bin": "cli.js"}
    files = {
        "package.json": json.dumps(package),
        "cli.js": "#!/usr/bin/env node\nconsole.log(require('./text'))\n",
        "text.js": "module.exports = 'greetings'\n",
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size, member.mode = len(text), 0o755
            archive.addfile(member, io.BytesIO(text.encode()))
    digest = base64.b64encode(hashlib.sha512(packed.getvalue()).digest()).decode()
    (work.base / "greet.tgz").write_bytes(packed.getvalue())
    needed = {"greet": "1.0.0"}
    locked = {
        "version": "1.0.0",
        "resolved": "https://registry.example.org/greet/-/greet-1.0.0.tgz",
        "integrity": f"sha512-{digest}",
        "bin": {"greet": "cli.js"},
    }
    project = {"name": "project", "version": "1.0.0", "dependencies": needed}
    lock = {
        **project,
        "lockfileVersion": 3,
        "packages": {"": project, "node_modules/greet": locked},
    }
    (work.base / "package.json").write_text(json.dumps(project))
    (work.base / "package-lock.json").write_text(json.dumps(lock))
    script = (
        "npm cache add --cache .cache ./greet.tgz >/dev/null;"
        " npm ci --offline --no-audit --no-fund --cache .cache >/dev/null;"
        " node_modules/.bin/greet; npx --offline greet; npm exec --offline -c greet"
    )
    assert work.says(script) == "greetings\n" * 3


# spec HM4, WS3a: the kernel refuses that rename in a user namespace
@pytest.mark.nobody
def test_git_commits_and_directories_are_renamed(work: Work) -> None:
    needs("git", "python3")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        env = {**os.environ, **IDENTITY}
        subprocess.run(["git", *words], cwd=work.base, env=env, check=True)
    options = [word for item in IDENTITY.items() for word in ("--env", "=".join(item))]
    script = (
        "git status --short; echo more >> a.txt; git commit -qam two; mv src lib;"
        " git add -A; git commit -qm three; git log --format=%s; git status --short;"
        " mkdir new; git mv lib/b.txt new/b.txt; mv new newer; ls newer"
    )
    assert work.says(script, *options).split() == ["three", "two", "one", "b.txt"]
    renames = (
        'python3 -c \'import os, errno\ntry: os.rename("src", "x"); print("done")\n'
        "except OSError as why: print(errno.errorcode[why.errno])'"
    )
    assert work.says(renames).strip() == ("done" if IS_ROOT else "EXDEV")


# spec HM4, HM5
@pytest.mark.nobody
def test_cargo_builds_offline_with_its_toolchain_exposed(work: Work) -> None:
    try:
        home = pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        pytest.skip("this user has no home, and no toolchain of rustup there")
    rustup = Path(os.environ.get("RUSTUP_HOME") or f"{home}/.rustup")
    if not os.access(rustup / "toolchains", os.R_OK):
        pytest.skip(f"no toolchain of rustup that this user may read at {rustup}")
    needs("cc")
    toolchain = next(iter(sorted(rustup.glob("toolchains/stable-*"))), None)
    if toolchain is None:
        pytest.skip("no stable toolchain")
    (work.base / "Cargo.toml").write_text(
        '[package]\nname = "greet"\nversion = "1.0.0"\nedition = "2021"\n'
    )
    (work.base / "src" / "main.rs").write_text('fn main() { println!("greetings"); }\n')
    script = f"PATH={toolchain}/bin:$PATH; cargo build -q --offline; target/debug/greet"
    assert work.says(script, "--expose", str(toolchain)) == "greetings\n"


# spec HM4
@pytest.mark.nobody
def test_make_builds(work: Work) -> None:
    needs("make")
    (work.base / "Makefile").write_text("out: a.txt\n\tcp a.txt out\n\tcat out\n")
    assert "hello" in work.says("make")


# spec HM4, HM5
@pytest.mark.nobody
def test_pytest_runs_a_project_s_tests(work: Work) -> None:
    (work.base / "test_it.py").write_text(
        "def test_it(tmp_path):\n    (tmp_path / 'x').write_text('x')\n"
    )
    packages = str(Path(pytest.__file__).parents[1])
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:randomly")
    outcome = work.run("", "--expose", packages, command=words)
    assert b"1 passed" in outcome.out, outcome


# spec HM4, HM3
@pytest.mark.nobody
def test_programs_have_terminals_and_a_tmp(work: Work) -> None:
    needs("script", "tmux", "python3")
    script = (
        "script -qec tty /dev/null; tmux new-session -d 'tty > tty.out; sleep 60';"
        " until test -s tty.out; do sleep 0.1; done; cat tty.out; tmux kill-server;"
        " python3 -c 'import os, pty; print(os.ttyname(pty.openpty()[1]))';"
        " echo x > /tmp/of-a-child; ls /tmp/of-a-child"
    )
    *terminals, tmp = work.says(script).split()
    assert len(terminals) == 3
    assert all(name.startswith("/dev/pts/") for name in terminals)
    assert tmp == "/tmp/of-a-child"
    assert not Path("/tmp/of-a-child").exists()


# spec HM5
def test_what_npm_put_beside_a_command_is_found(work: Work, tmp_path: Path) -> None:
    needs("node")
    modules = tmp_path / "app" / "node_modules"
    texts = {
        "greet/cli.js": "#!/usr/bin/env node\nconsole.log(require('text'))\n",
        "text/index.js": "module.exports = 'greetings'\n",
        "../.env": "SECRET=1\n",
    }
    for name, text in texts.items():
        (modules / name).parent.mkdir(parents=True, exist_ok=True)
        (modules / name).write_text(text)
        (modules / name).chmod(0o755)
    (modules / ".bin").mkdir()
    (modules / ".bin" / "greet").symlink_to("../greet/cli.js")
    outcome = work.run("", command=(str(modules / ".bin" / "greet"),))
    assert outcome.out == b"greetings\n", outcome
    beside = f"require('fs').readFileSync('{tmp_path}/app/.env')"
    (modules / "greet" / "cli.js").write_text(f"#!/usr/bin/env node\n{beside}\n")
    outcome = work.run("", command=(str(modules / ".bin" / "greet"),))
    assert b"ENOENT" in outcome.err


# spec HM5
def test_a_venv_finds_the_python_that_it_was_made_from(tmp_path: Path) -> None:
    for name in ("venv/bin", "venv/lib", "base/bin", "base/lib", "base/secrets"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("venv/bin/python", "base/bin/python"):  # copies, and no link to it
        shutil.copy("/bin/sh", tmp_path / name)
    (tmp_path / "base" / "lib" / "note").write_text("found\n")
    (tmp_path / "venv" / "pyvenv.cfg").write_text(f"home = {tmp_path}/base/bin\n")
    script = f"cat {tmp_path}/base/lib/note; ls {tmp_path}/base"
    python = str(tmp_path / "venv" / "bin" / "python")
    outcome = sandhost("run", "--cwd", "/", "--", python, "-c", script)
    assert outcome.out == b"found\nbin\nlib\n", outcome


# spec HM5
def test_a_program_that_is_not_shown_is_named_with_what_to_expose(
    work: Work, tmp_path: Path
) -> None:
    kept = ("--workspace-name", "w")
    prefix = tmp_path / "other"
    (prefix / "bin").mkdir(parents=True)
    shutil.copy("/bin/sh", prefix / "bin" / "sh")
    made = f"ln -s {prefix}/bin/sh link; echo '#!{work.base}/link' > script; chmod +x script"
    assert work.run(made, *kept).status == 0
    for name in ("link", "script"):
        command = (str(work.base / name), "-c", "echo ran")
        outcome = work.run("", *kept, command=command)
        assert outcome.status == 127
        assert f"show it by --expose {str(prefix)!r}" in outcome.err.decode()
        shown = work.run("", *kept, "--expose", str(prefix), command=command)
        assert shown.status == 0
