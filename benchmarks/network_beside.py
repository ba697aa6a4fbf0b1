"""Other products beside the host: programs that work in each, and their speed.

The servers and the programs are those of the tests, in a net namespace that is all the
world. Each product is as its registry has it, in a cache outside of this repository, and
is told to let through the same name and ports.
"""

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.measure import AbsentError, MeasureError, in_turn, workplace
from benchmarks.report import Row, at_least
from tests.helpers import networkworld
from tests.helpers.networkclients import (
    CLIENTS,
    NAME,
    PORTS,
    PROGRAMS,
    Client,
    MissingError,
    command,
    fill,
    installation,
)

SANDHOST = Path(sys.executable).with_name("sandhost")
PEERS = Path(__file__).with_name("network_peers.py")
INSTALL_S, CLIENT_S, TAKE_S = 300.0, 40.0, 60.0
"""The longest that each may take; a client that tries again for longer has failed."""

TRIES = 2
"""Of each client: one that failed by chance is not counted."""

BULK, FIRST, MEBIBYTES, CONNECTIONS = 8001, 8002, 256, 200
RULE = f"{NAME}:{PORTS},{BULK},{FIRST}"

RUNTIME, SANDLOCK = "@anthropic-ai/sandbox-runtime", "sandlock"
IN_SANDLOCK = """
import sys
from sandlock import Sandbox
box = Sandbox(fs_readable=["/"], fs_writable=["/tmp", "/dev", sys.argv[1]],
              net_allow=[sys.argv[2]])
done = box.run(sys.argv[3:], timeout=60)
sys.stdout.buffer.write(done.stdout)
sys.stderr.buffer.write(done.stderr)
sys.exit(done.exit_code)
"""

Wrap = Callable[[Sequence[str], bool], list[str]]


@dataclass(frozen=True, slots=True)
class Product:
    """A product that runs programs.

    Attributes:
        name: with its version.
        wrap: returns the command for a program, with or without proxy variables.
        has_proxy: whether it has variables that name a proxy.
        needs_proxy: whether nothing is reached without them.
    """

    name: str
    wrap: Wrap
    has_proxy: bool = True
    needs_proxy: bool = False


def measure_beside(rounds: int) -> list[Row]:
    """Take figures of all products on the same programs, in the same world."""
    # Not below /dev, which a product may hide.
    with workplace(Path(tempfile.gettempdir())) as place:
        place.chmod(0o755)
        fill(place)
        shutil.copy(PEERS, place)
        clients, missing = _clients(place)
        rows = []
        products = []
        for find in (_sandhost, _runtime, _sandlock):
            try:
                product = find(place)
                _check(product, place)
            except MeasureError as why:
                name = find.__name__.removeprefix("_")
                rows.append(Row(name, None, "", detail=str(why), is_absent=True))
                continue
            products.append(product)
            rows += _count(product, clients, missing, place)
        return rows + _speeds(products, rounds, place)


def _clients(place: Path) -> tuple[dict[str, Client], list[str]]:
    found, missing = {}, []
    for name, client in CLIENTS.items():
        try:
            command(client, place)
        except MissingError:
            missing.append(name)
        else:
            found[name] = client
    return found, missing


def _check(product: Product, place: Path) -> None:
    """Check that a product runs a program here at all."""
    done = _run(product, ("echo", "begun"), place, has_proxy=False, timeout_s=TAKE_S)
    if done.stdout != "begun\n":
        said = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise AbsentError(f"it does not run here: {said}")


def _count(
    product: Product, clients: dict[str, Client], missing: list[str], place: Path
) -> list[Row]:
    """Return how many programs work, without and with proxy variables."""
    rows = []
    for has_proxy in (False, True):
        name = f"programs {'with' if has_proxy else 'without'} proxy variables: {product.name}"
        if has_proxy and not product.has_proxy:
            rows.append(Row(name, None, "", detail="it has no proxy", is_absent=True))
            continue
        failed = [
            key
            for key, client in clients.items()
            if not any(
                _works(product, client, place, has_proxy=has_proxy)
                for _ in range(TRIES)
            )
        ]
        detail = f"not: {', '.join(failed)}" if failed else ""
        if missing:
            detail += f"; not here: {', '.join(missing)}"
        is_own = product.name == "sandhost" and not has_proxy
        aim = at_least(len(clients)) if is_own else None
        worked = len(clients) - len(failed)
        rows.append(Row(name, worked, f"of {len(clients)}", aim, detail.strip("; ")))
    return rows


def _works(product: Product, client: Client, place: Path, *, has_proxy: bool) -> bool:
    words = command(client, place)
    try:
        done = _run(product, words, place, has_proxy=has_proxy, timeout_s=CLIENT_S)
    except subprocess.TimeoutExpired:
        return False
    return client.wanted in done.stdout


def _speeds(products: list[Product], rounds: int, place: Path) -> list[Row]:
    """Return how fast bytes come through each product, and beside them directly."""
    directly = Product("nothing between", lambda words, _: list(words))
    contenders = [*products, directly]
    taken = [
        in_turn(number, [partial(_take, one, place) for one in contenders])
        for number in range(rounds)
    ]
    rows = []
    for index, product in enumerate(contenders):
        seconds = [row[index][0] for row in taken]
        firsts = [row[index][1] for row in taken]
        speed = MEBIBYTES / 1024 / statistics.median(seconds)
        how = "by its proxy" if product.needs_proxy else ""
        rows.append(Row(f"download: {product.name}", speed, "GiB/s", detail=how))
        rows.append(
            Row(f"name to first byte: {product.name}", statistics.median(firsts), "ms",
                detail=how)
        )  # fmt: skip
    return rows


def _take(product: Product, place: Path) -> tuple[float, float]:
    words = [sys.executable, "-S", str(place / PEERS.name), "take", NAME]
    words += map(str, (BULK, FIRST, CONNECTIONS))
    has_proxy = product.needs_proxy
    done = _run(product, words, place, has_proxy=has_proxy, timeout_s=TAKE_S)
    figures = done.stdout.split()
    if done.returncode or len(figures) != 2:
        raise MeasureError(f"{product.name}: no bytes: {done.stderr.strip()[-200:]}")
    return float(figures[0]), float(figures[1])


def _run(
    product: Product,
    words: Sequence[str],
    place: Path,
    *,
    has_proxy: bool,
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    """Run a program in a product in the world, with a HOME that nothing has used."""
    home = place / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    home.chmod(0o777)
    served = (networkworld.ADDRESS, BULK, FIRST, MEBIBYTES)
    outer = ["unshare", "--net", "--mount", sys.executable, networkworld.__file__]
    outer += [str(place), str(place / "tls.pem")]
    outer += [sys.executable, "-S", str(PEERS), "world", *map(str, served)]
    with subprocess.Popen(
        [*outer, *product.wrap(words, has_proxy)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=_environment(place), cwd=place, process_group=0,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _environment(place: Path) -> dict[str, str]:
    return {"PATH": PROGRAMS, "HOME": str(place / "home"), "LANG": "C.UTF-8"}


def _sandhost(place: Path) -> Product:
    del place
    cargo = None
    with suppress(MissingError):
        cargo = installation(CLIENTS["cargo"])
    shown = [] if cargo is None else ["--expose", str(cargo)]

    def wrap(words: Sequence[str], has_proxy: bool) -> list[str]:
        options = ["--network", RULE, *shown, *(["--proxy-env"] if has_proxy else [])]
        return [str(SANDHOST), "run", *options, "--", *words]

    return Product("sandhost", wrap)


def _runtime(place: Path) -> Product:
    where = _cache() / "npm"
    package = where / "node_modules" / RUNTIME
    if not package.exists():
        _install(["npm", "install", "--silent", "--prefix", str(where), RUNTIME])
    version = json.loads((package / "package.json").read_text())["version"]
    for name in ("bwrap", "socat", "rg"):
        if shutil.which(name, path=PROGRAMS) is None:
            raise AbsentError(f"it needs {name}")
    settings = place / "settings.json"
    network = {"allowedDomains": [NAME], "deniedDomains": []}
    files = {"denyRead": [], "allowWrite": [str(place), "/tmp"], "denyWrite": []}  # noqa: S108 - inside its sandbox
    settings.write_text(json.dumps({"network": network, "filesystem": files}))
    program = str(where / "node_modules" / ".bin" / "srt")
    bare = [f"{name}={value}" for name, value in _environment(place).items()]

    def wrap(words: Sequence[str], has_proxy: bool) -> list[str]:
        inner = list(words) if has_proxy else ["env", "-i", *bare, *words]
        return [program, "--settings", str(settings), "-c", shlex.join(inner)]

    return Product(f"{RUNTIME} {version}", wrap, needs_proxy=True)


def _sandlock(place: Path) -> Product:
    where = _cache() / "sandlock"
    python = where / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    if not python.exists():
        _install([sys.executable, "-m", "venv", "--without-pip", str(where)])
        _install([*pip, "install", "-q", SANDLOCK])
    shown = _install([*pip, "show", SANDLOCK])
    version = next(
        line.split()[1] for line in shown.splitlines() if line.startswith("Version:")
    )

    def wrap(words: Sequence[str], has_proxy: bool) -> list[str]:
        del has_proxy
        return [str(python), "-c", IN_SANDLOCK, str(place), RULE, *words]

    return Product(f"{SANDLOCK} {version}", wrap, has_proxy=False)


def _cache() -> Path:
    """Return where products outlive a run."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    made = Path(home) / "sandhost" / "peers"
    made.mkdir(parents=True, exist_ok=True)
    return made


def _install(words: list[str]) -> str:
    """Run an installer; return what it printed."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=INSTALL_S
        )
    except (OSError, subprocess.TimeoutExpired) as why:
        raise AbsentError(f"cannot install it: {why}") from why
    if done.returncode:
        said = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise AbsentError(f"cannot install it: {said}")
    return done.stdout
