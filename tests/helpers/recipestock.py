"""The stock of the servers of `recipeworld`: packages, a repository, a database."""

import base64
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

from tests.helpers.certificates import certificate
from tests.helpers.command import TIMEOUT_S
from tests.helpers.recipeworld import DATABASE_USER, NAMES

DISTRIBUTION, VERSION = "six", "7.7.7"
"""The name that the page installs; the version tells this one from any other."""

SAID = "from the index of the test"


def fill(place: Path) -> None:
    """Fill a directory with all that is served."""
    certificate(place, *NAMES)
    _add_wheel(place)
    _add_npm_package(place)
    _add_repository(place)
    _add_ssh(place)
    for path in (place, *place.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    if (key := place / "sshd" / "host_key").exists():
        key.chmod(0o600)
    _add_database(place)


def _add_wheel(place: Path) -> None:
    name = f"{DISTRIBUTION}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(place / name, "w") as wheel:
        made = f"{DISTRIBUTION}-{VERSION}.dist-info"
        wheel.writestr(f"{DISTRIBUTION}.py", f"SAID = {SAID!r}\n")
        wheel.writestr(
            f"{made}/METADATA",
            f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {VERSION}\n",
        )
        wheel.writestr(
            f"{made}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{made}/RECORD", "")
    page = place / "simple" / DISTRIBUTION
    page.mkdir(parents=True)
    link = f"<a href='https://files.example.com/{name}'>{name}</a>"
    (page / "index.html").write_text(link)


def _add_npm_package(place: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        files = {
            "package.json": json.dumps({"name": "demo", "version": "1.0.0"}),
            "index.js": f"module.exports = {SAID!r};\n",
        }
        for name, text in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    data = packed.getvalue()
    (place / "demo.tgz").write_bytes(data)
    digest = base64.b64encode(hashlib.sha512(data).digest()).decode()
    dist = {
        "tarball": "https://registry.example.com/demo.tgz",
        "integrity": f"sha512-{digest}",
    }
    version = {"name": "demo", "version": "1.0.0", "dist": dist}
    package = {
        "name": "demo",
        "dist-tags": {"latest": "1.0.0"},
        "versions": {"1.0.0": version},
    }
    (place / "demo").write_text(json.dumps(package))


def _add_repository(place: Path) -> None:
    if shutil.which("git") is None:
        return
    source, served = place / "source", place / "demo.git"
    source.mkdir()
    (source / "said").write_text(SAID)
    author = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    for words in (
        ("init", "-q", str(source)),
        ("-C", str(source), "add", "said"),
        ("-C", str(source), *author, "commit", "-q", "-m", "a file"),
        ("clone", "-q", "--bare", str(source), str(served)),
    ):
        subprocess.run(["git", *words], check=True, timeout=TIMEOUT_S)


def _add_ssh(place: Path) -> None:
    """Make keys, and the settings of an sshd that serves the repository alone."""
    if shutil.which("ssh-keygen") is None:
        return
    where = place / "sshd"
    where.mkdir()
    for name in ("host_key", "user_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(where / name)]
        subprocess.run(words, check=True, timeout=TIMEOUT_S)
    known = (where / "host_key.pub").read_text()
    (where / "known_hosts").write_text(f"git.example.com {known}")
    command = f'command="git-upload-pack {place}/demo.git",restrict '
    user = (where / "user_key.pub").read_text()
    (where / "authorized_keys").write_text(command + user)
    (where / "config").write_text(
        f"HostKey {where}/host_key\nAuthorizedKeysFile {where}/authorized_keys\n"
        "PidFile none\nUsePAM no\nStrictModes no\nLogLevel QUIET\n"
        "PermitRootLogin forced-commands-only\nPasswordAuthentication no\n"
    )


def postgres() -> Path | None:
    """Return PostgreSQL's server, or None if it is not installed."""
    found = shutil.which("postgres")
    if found is None:
        candidates = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
        found = str(candidates[-1]) if candidates else None
    return None if found is None else Path(found).resolve()


def _add_database(place: Path) -> None:
    program = postgres()
    if program is None:
        return
    (place / "postgres").symlink_to(program)
    data = place / "database"
    data.mkdir(mode=0o700)
    shutil.chown(data, DATABASE_USER, DATABASE_USER)
    subprocess.run(
        [program.with_name("initdb"), "-D", data, "-U", "a", "-A", "trust", "--no-sync",
         "--no-locale", "-E", "UTF8"],
        check=True, cwd="/", user=DATABASE_USER, group=DATABASE_USER, extra_groups=[],
        stdout=subprocess.DEVNULL, timeout=TIMEOUT_S,
    )  # fmt: skip
    with (data / "pg_hba.conf").open("a") as rules:
        rules.write("host all all 0.0.0.0/0 trust\n")
