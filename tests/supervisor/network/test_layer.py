"""The net namespace and root of a child with a network by name."""

import errno
import json
import os
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import trio

from supervisor.handover.exchange import SERVICES
from supervisor.network.additions import Additions
from supervisor.network.addresses import judge
from supervisor.network.child_network import ChildNetwork
from supervisor.network.network_state import restore_rule, snapshot_rule
from supervisor.network.rule import RuleError
from supervisor.network.rules import Grant
from supervisor.network.section import NetworkSection
from supervisor.network.service import (
    STOCK,
    STOCK_TO_PUBLISH,
    NetworkService,
    open_network,
    order_of,
    sockets_of,
)
from supervisor.network.settings import settings_from
from supervisor.sandbox import host_directories
from supervisor.sandbox.plan import PROFILES, make_profile
from supervisor.spawn.inner_pair import InnerListener
from tests.helpers.leaks import no_descriptor_left
from tests.helpers.stage import Puppet, Stage, descriptors, open_stage, stage

__all__ = ["stage"]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nobody_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the host ask no name server: a look-up may outlive the host."""

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "not known")

    monkeypatch.setattr("supervisor.network.resolver.socket.getaddrinfo", unknown)


WORDS = """
import socket

def answers(name, port=443):
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [where[0] for *_, where in found]

def connect(host, port):
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(kind)
    sock.settimeout(60)
    sock.connect((host, port))
    return sock

def ends(host, port):
    # The host may reset it at once: connect says so if it wakes up after that, and
    # getpeername would fail.
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.settimeout(60)
    try:
        sock.connect((host, port))
    except ConnectionResetError:
        pass
    return sock.getsockname()[0], host

def fault(call):
    try:
        call()
    except OSError as why:
        return why.errno

def read_text(path):
    with open(path) as file:
        return file.read()

def listening(table):
    rows = [line.split() for line in read_text("/proc/net/" + table).splitlines()[1:]]
    return sorted(int(row[1].split(":")[1], 16) for row in rows if row[3] in ("0A", "07"))

def listen(port, host="127.0.0.1"):
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.bind((host, port))
    return sock
"""

RULES = ("example.com", "db.example.com:5432", "10.1.2.3:80", "[2001:db8:7::]/64:80")


class Scene:
    """A host whose children may have a network by name."""

    def __init__(self, stage: Stage, service: NetworkService) -> None:
        self.stage = stage
        self.service = service

    async def puppet(self, *rules: str, **keys: Any) -> Puppet:
        """Start a child with rules that knows the words above."""
        section = NetworkSection(network=list(rules or RULES), **keys)
        puppet = await self.stage.puppet(network="rules", network_keys=section)
        await puppet.do(f"exec({WORDS!r}, globals())")
        return puppet

    def held(self) -> set[int]:
        """Return the descriptors that are held for children, without the host's own."""
        own = "listeners of the network"
        return {number for number, word in self.service.descriptors() if word != own}


@asynccontextmanager
async def offering(where: Path) -> AsyncIterator[Scene]:
    """Open a host whose children run in all that the machine gives."""
    where.chmod(0o755)  # noqa: ASYNC240 - of the test's own
    async with open_stage(where, log_level="WARNING") as stage:
        stage.sandbox = PROFILES["auto"]
        async with open_network(stage.host) as service:
            yield Scene(stage, service)
            await stage.host.stop(grace_s=0.0)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """Return such a host."""
    async with offering(tmp_path) as made:
        yield made


# spec NET4, NET5: both addresses of a granted name are the pool's, and a source is there.
@pytest.mark.nobody
async def test_a_granted_name_has_addresses_and_they_can_be_connected_to(
    scene: Scene,
) -> None:
    puppet = await scene.puppet()
    found = await puppet.do("answers('example.com')")
    assert sorted(found) == ["198.18.0.2", "fd5a:6e64:686f::2"]
    assert await puppet.do("ends('198.18.0.2', 443)") == ("198.18.0.1", "198.18.0.2")
    v6 = ("fd5a:6e64:686f::1", "fd5a:6e64:686f::2")
    assert await puppet.do("ends('fd5a:6e64:686f::2', 443)") == v6
    assert await puppet.do("fault(lambda: answers('other.example.com'))") == (
        socket.EAI_NONAME
    )


# spec NET4, NET6: no route but those of its rules; other ports of a name are closed.
# attack 58
@pytest.mark.nobody
async def test_what_no_rule_names_has_no_route_and_other_ports_are_closed(
    scene: Scene,
) -> None:
    puppet = await scene.puppet()
    for host in ("1.1.1.1", "10.1.2.4", "2001:db8:8::1"):
        fault = await puppet.do(f"fault(lambda: connect({host!r}, 80))")
        assert fault == errno.ENETUNREACH
    await puppet.do("answers('example.com')")
    for host in ("198.18.0.2", "fd5a:6e64:686f::2", "10.1.2.3"):
        fault = await puppet.do(f"fault(lambda: connect({host!r}, 81))")
        assert fault == errno.ECONNREFUSED


# spec NET4, NET5: addresses that rules name are local, with the namespace as source.
@pytest.mark.nobody
async def test_an_address_of_a_rule_has_a_route_of_its_own(scene: Scene) -> None:
    puppet = await scene.puppet()
    assert await puppet.do("ends('10.1.2.3', 80)") == ("198.18.0.1", "10.1.2.3")
    v6 = ("fd5a:6e64:686f::1", "2001:db8:7::9")
    assert await puppet.do("ends('2001:db8:7::9', 80)") == v6


# spec NET4: what listens in the namespace, and that the child itself cannot there.
@pytest.mark.nobody
async def test_the_host_listens_on_granted_ports_and_its_own(scene: Scene) -> None:
    puppet = await scene.puppet()
    assert await puppet.do("listening('tcp')") == [53, 80, 443, 3128, 5432]
    assert await puppet.do("listening('tcp6')") == [80, 443, 5432]
    assert await puppet.do("listening('udp')") == [53]
    for port in (5432, 3128):
        assert await puppet.do(f"fault(lambda: listen({port}))") == errno.EADDRINUSE
    # spec NET9: its own servers stand on other ports, and nothing pins these.
    assert await puppet.do("fault(lambda: listen(8080, '0.0.0.0'))") is None


# spec NET4: the listener of port 53 or 3128 is one, on all addresses.
@pytest.mark.nobody
@pytest.mark.parametrize("port", [53, 3128])
async def test_a_granted_port_of_the_hosts_own_shares_its_listener(
    scene: Scene, port: int
) -> None:
    puppet = await scene.puppet(f"example.com:{port}")
    assert await puppet.do("listening('tcp')") == [53, 3128]
    assert await puppet.do("listening('tcp6')") == [port]
    await puppet.do("answers('example.com')")
    assert await puppet.do(f"ends('198.18.0.2', {port})") == (
        "198.18.0.1",
        "198.18.0.2",
    )
    assert await puppet.do("ends('127.0.0.1', 53)") == ("127.0.0.1", "127.0.0.1")


# spec NET4: how names are looked up, and who the child is: without that line ssh ends.
@pytest.mark.nobody
async def test_the_files_of_its_root_name_the_host_as_resolver_and_its_user(
    scene: Scene,
) -> None:
    puppet = await scene.puppet()
    own = os.uname().nodename
    assert await puppet.do("read_text('/etc/resolv.conf')") == (
        "nameserver 127.0.0.1\noptions ndots:1\n"
    )
    assert await puppet.do("read_text('/etc/hosts')") == (
        f"127.0.0.1 localhost {own}\n::1 localhost {own}\n"
    )
    assert "hosts: files dns\n" in await puppet.do("read_text('/etc/nsswitch.conf')")
    assert await puppet.do("os.uname().nodename") == own
    for name in ("localhost", own):
        assert set(await puppet.do(f"answers({name!r})")) == {"127.0.0.1", "::1"}
    await puppet.do("exec('import pwd, grp', globals())")
    name = await puppet.do("pwd.getpwuid(os.getuid()).pw_name")
    assert name == await puppet.do("grp.getgrgid(os.getgid()).gr_name")
    assert name in {"child", "root"}


# spec NET4: a path passes a net namespace: no socket of the host's resolvers is seen.
# attack 60
@pytest.mark.nobody
async def test_sockets_of_the_hosts_resolvers_are_hidden_even_in_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = tmp_path / "run"
    resolver = shown / "nscd"
    resolver.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(resolver / "socket"))
        sock.listen()
        monkeypatch.setattr(host_directories, "RESOLVERS", (str(resolver),))
        async with offering(tmp_path) as scene:
            keys = NetworkSection(network=["example.com"])
            expose = {"expose": (str(shown),)}
            puppet = await scene.stage.puppet(
                network="rules", network_keys=keys, **expose
            )
            assert await puppet.do(f"os.listdir({str(shown)!r})") == ["nscd"]
            assert await puppet.do(f"os.listdir({str(resolver)!r})") == []
            other = await scene.stage.puppet(**expose)
            assert await other.do(f"os.listdir({str(resolver)!r})") == ["socket"]
            for path in ("/run/nscd", "/run/systemd", "/run/dbus", "/var/run/nscd"):
                assert not await puppet.do(f"os.path.exists({path!r})")


# spec NET8: the proxy is named in the environment only where that is asked for.
@pytest.mark.nobody
@pytest.mark.parametrize("is_named", [False, True])
async def test_the_environment_names_the_proxy_if_that_is_asked_for(
    scene: Scene, is_named: bool
) -> None:
    puppet = await scene.puppet("example.com", proxy_env=is_named)
    found = await puppet.do(
        "{k: v for k, v in os.environ.items() if 'proxy' in k.lower() and k[:2] != 'FS'}"
    )
    url = "http://127.0.0.1:3128"
    assert found.get("https_proxy") == (url if is_named else None)
    assert bool(found) == is_named
    await puppet.do("ends('127.0.0.1', 3128)")


# I1: all of it is told of while the child runs, and closed when it has ended.
@pytest.mark.nobody
async def test_what_the_host_holds_of_a_child_ends_with_it(scene: Scene) -> None:
    account = scene.stage.host.fs.descriptor_account
    used = account.used
    puppet = await scene.puppet()
    network = scene.service.network_of(puppet.child.id)
    assert network is not None
    held = scene.held()
    assert len(held & descriptors()) >= 3 + 2 * 3 + 2 * STOCK
    assert account.used >= used + len(held)
    await puppet.kill()
    assert scene.service.network_of(puppet.child.id) is None
    assert account.used == used
    assert not held & descriptors()


# spec I1: all that is held of a child but its connections is handed over.
@pytest.mark.nobody
async def test_what_is_held_of_a_child_is_handed_over(scene: Scene) -> None:
    assert SERVICES[0] == "network"
    assert scene.stage.host.services.network is scene.service
    with ExitStack() as stack:
        assert scene.service.snapshot(stack) == ({"children": {}}, set())
        puppet = await scene.puppet()
        _, fds = scene.service.snapshot(stack)
        assert set(fds) == scene.held()
        await puppet.kill()
        assert scene.service.snapshot(stack) == ({"children": {}}, set())


# spec NET12, NET4: an address that is allowed live gets a route in the namespace.
@pytest.mark.nobody
async def test_an_address_that_is_allowed_live_can_be_connected_to(
    scene: Scene,
) -> None:
    puppet = await scene.puppet()
    change = scene.service.change_network
    for host, rule in (
        ("10.1.2.4", "10.1.2.0/24:80"),
        ("2001:db8:8::7", "[2001:db8:8::7]:80"),
    ):
        what = f"fault(lambda: connect({host!r}, 80))"
        assert await puppet.do(what) == errno.ENETUNREACH
        await change(puppet.child.id, [rule], [], cut=False)
        assert (await puppet.do(f"ends({host!r}, 80)"))[1] == host
    # The old routes stay, and the child itself can add nothing.
    assert (await puppet.do("ends('10.1.2.3', 80)"))[1] == "10.1.2.3"
    assert scene.stage.host.launcher.is_at_rest


# spec NET12, NET4: more ports than the stock has sockets.
@pytest.mark.nobody
async def test_more_ports_than_the_stock_can_be_allowed_live(scene: Scene) -> None:
    puppet = await scene.puppet()
    account = scene.stage.host.fs.descriptor_account
    used = account.used
    held = len(scene.held())
    ports = range(8000, 8000 + 3 * STOCK)
    rule = f"example.com:{','.join(map(str, ports))}"
    await scene.service.change_network(puppet.child.id, [rule], [], cut=False)
    for port in (*ports[:2], ports[-1]):
        for address in ("198.18.0.2", "fd5a:6e64:686f::2"):
            await puppet.do(f"ends({address!r}, {port})")
    listening = await puppet.do("listening('tcp')")
    assert set(ports) <= set(listening)
    # They are in the table, and in the account of what is left for files.
    now = len(scene.held())
    assert now - held == account.used - used > 0
    await puppet.kill()
    assert not scene.held()


# I1, spec NET12: an order that fails again and again uses up nothing of the host.
@pytest.mark.nobody
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_sockets_of_an_order_that_fails_are_given_back(
    scene: Scene, address: str
) -> None:
    puppet = await scene.puppet()
    account = scene.stage.host.fs.descriptor_account
    others = account.used - len(scene.held())
    await puppet.do(f"globals().update(own=listen(8000, {address!r}))")
    for _ in range(2 * STOCK):  # more than there are at first
        with pytest.raises(RuleError, match="the child listens on it itself"):
            await scene.service.change_network(
                puppet.child.id, ["example.com:8000"], [], cut=False
            )
        assert account.used - len(scene.held()) == others
    await puppet.kill()
    assert account.used == 0


# I1: a child that ends while sockets are made for it keeps none of them.
async def test_sockets_that_come_after_the_child_are_closed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    puppet = await scene.puppet()
    made, ended = trio.Event(), trio.Event()
    make = Additions.make_sockets

    async def make_late(
        additions: Additions, families: Iterable[int]
    ) -> list[socket.socket]:
        found = await make(additions, families)
        made.set()
        await ended.wait()
        return found

    monkeypatch.setattr(Additions, "make_sockets", make_late)
    account = scene.stage.host.fs.descriptor_account
    rule = f"example.com:{','.join(map(str, range(8000, 8000 + 3 * STOCK)))}"
    async with trio.open_nursery() as nursery:

        async def change() -> None:
            with pytest.raises(RuleError, match="the child has ended"):
                await scene.service.change_network(
                    puppet.child.id, [rule], [], cut=False
                )

        nursery.start_soon(change)
        await made.wait()
        await puppet.kill()
        ended.set()
    assert account.used == 0
    assert not scene.held()


# I1: they may also come while its network waits for the end of its connections.
async def test_sockets_that_come_while_a_network_is_closed_are_given_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, closing, changed = trio.Event(), trio.Event(), trio.Event()
    make, aclose = Additions.make_sockets, ChildNetwork.aclose

    async def make_late(
        additions: Additions, families: Iterable[int]
    ) -> list[socket.socket]:
        found = await make(additions, families)
        made.set()
        await closing.wait()
        return found

    async def close_late(network: ChildNetwork) -> None:
        closing.set()
        with trio.CancelScope(shield=True):
            await changed.wait()
        await aclose(network)

    monkeypatch.setattr(Additions, "make_sockets", make_late)
    monkeypatch.setattr(ChildNetwork, "aclose", close_late)
    puppet = await scene.puppet()
    account = scene.stage.host.fs.descriptor_account
    rule = f"example.com:{','.join(map(str, range(8000, 8000 + 3 * STOCK)))}"
    async with trio.open_nursery() as nursery:

        async def change() -> None:
            with suppress(RuleError):  # it may have ended before the last are made
                await scene.service.change_network(
                    puppet.child.id, [rule], [], cut=False
                )
            changed.set()

        nursery.start_soon(change)
        await made.wait()
        await puppet.kill()
    assert account.used == 0
    assert not scene.held()


# spec NET12: where the launchpad can make none nothing is changed, and it is said.
async def test_a_namespace_that_cannot_be_entered_is_told(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    puppet = await scene.puppet()

    def refuse(_: int) -> int:
        raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))

    monkeypatch.setattr("supervisor.network.additions.open_net_namespace", refuse)
    network = scene.service.network_of(puppet.child.id)
    assert network is not None
    before = network.rules
    for rule, reason in (
        ("10.9.9.9:80", "no route to it in the child's network: Inappropriate ioctl"),
        (
            f"a.example:{','.join(map(str, range(8000, 8000 + STOCK + 1)))}",
            "no listener on port 8000: Inappropriate ioctl",
        ),
    ):
        with pytest.raises(RuleError, match=reason):
            await scene.service.change_network(puppet.child.id, [rule], [], cut=False)
    assert network.rules == before


# spec NET10: more connections to a published port than the stock has sockets.
@pytest.mark.nobody
async def test_more_connections_than_the_stock_reach_a_published_port(
    scene: Scene,
) -> None:
    puppet = await scene.puppet(publish=["8000"])
    network = scene.service.network_of(puppet.child.id)
    assert network is not None
    await puppet.do(
        "exec('server = socket.create_server((\"127.0.0.1\", 8000), backlog=99)', globals())"
    )
    host, port = network.statistics().published[0].address.split(":")
    with ExitStack() as stack:
        for _ in range(STOCK_TO_PUBLISH + 3):
            sock = stack.enter_context(trio.socket.socket())
            await sock.connect((host, int(port)))
            await sock.send(b"x")
        for _ in range(STOCK_TO_PUBLISH + 3):
            assert await puppet.do("server.accept()[0].recv(1)") == b"x"


async def _narrow(puppet: Puppet, rules: list[str], fd: int | None = None) -> str:
    text = json.dumps({"network": rules}).encode()
    request = b"NARROW %d\n%b" % (len(text), text)
    reply: bytes = await puppet.do(f"ask({request!r}, {fd})")
    return reply.decode()


# spec NET2: NARROW takes rules away for good, and gives none.
@pytest.mark.nobody
async def test_a_child_gives_up_rules(scene: Scene) -> None:
    rules = (
        "example.com:443,80",
        "*.example.com:80",
        "0.0.0.0/0:80",
        "!b.example.com:80",
    )
    puppet = await scene.puppet(*rules)
    network = scene.service.network_of(puppet.child.id)
    assert network is not None
    for rule, why in (
        ("other.org", "the parent has no rule for port 443"),
        ("example.com:80@private", "the parent has it without private"),
        ("example.com@tls=any", "the parent has it without tls=any"),
        ("b.example.com:80", "the parent's '!b.example.com:80' refuses it"),
        ("a.*.b", "cannot read the rule"),
    ):
        reply = await _narrow(puppet, ["example.com", rule])
        assert reply.startswith("ERROR invalid rights: "), reply
        assert rule in reply
        assert why in reply
    assert network.rules.texts() == rules
    assert await _narrow(puppet, ["a.example.com:80", "10.1.2.3:80"]) == "OK"
    left = ("a.example.com:80", "10.1.2.3:80", "!b.example.com:80")
    assert network.rules.texts() == left
    unknown = socket.EAI_NONAME
    assert await puppet.do("fault(lambda: answers('example.com'))") == unknown
    assert await puppet.do("fault(lambda: connect('198.18.0.9', 443))") == (
        errno.ECONNREFUSED
    )
    assert await puppet.do("len(answers('a.example.com'))") == 2
    # spec NET3: a part of a wide network opens no more than the whole, handed over or not.
    for rule in (*network.rules, *map(restore_rule, map(snapshot_rule, network.rules))):
        opened = Grant(80, (rule,)).opening()
        assert judge([ip_address("10.1.2.3")], opened, frozenset()) is not None
    assert "no rule for port 443" in await _narrow(puppet, ["example.com"])
    assert await _narrow(puppet, []) == "OK"
    assert await puppet.do("fault(lambda: answers('a.example.com'))") == unknown
    told = [row["rules"] for row in scene.stage.events("network.narrowed")]
    assert told == [[*left], ["!b.example.com:80"]]


# spec NET2: what shares the namespace of its parent has no rules of its own.
async def test_a_nested_client_gives_up_no_rules_of_its_parent(scene: Scene) -> None:
    puppet = await scene.puppet()
    fd = await puppet.do("attached()")
    assert "use sandhost relay --network" in await _narrow(puppet, ["example.com"], fd)
    assert await puppet.do("len(answers('example.com'))") == 2
    other = await scene.stage.puppet()
    assert "has no network by name" in await _narrow(other, [])


# spec NET9: a child never gets more network than was said, nor a start without its rules.
@pytest.mark.nobody
@pytest.mark.parametrize(
    ("profile", "layer"),
    [
        (PROFILES["none"], "netns"),
        (make_profile("bare", ["landlock", "seccomp"]), "netns"),
        (
            make_profile("rootless", ["userns", "netns", "landlock", "seccomp"]),
            "mountns",
        ),
    ],
    ids=["none", "no netns", "no mountns"],
)
async def test_a_profile_that_cannot_keep_rules_refuses_the_start(
    scene: Scene, profile: Any, layer: str
) -> None:
    keys = NetworkSection(network=["example.com"])
    spec = scene.stage.spec(
        ("/bin/true",), network="rules", network_keys=keys, sandbox=profile
    )
    child = await scene.stage.host.spawn(spec)
    assert child.failure is not None
    assert f"cannot keep the network's rules: the sandbox layer '{layer}'" in (
        child.failure.text
    )


# spec NET9: so does a machine that gives no net namespace, under "auto" as well.
@pytest.mark.nobody
async def test_a_machine_without_net_namespaces_refuses_the_start(
    scene: Scene,
) -> None:
    scene.stage.host.machine.lacking["netns"] = "this machine has none"
    keys = NetworkSection(network=["example.com"])
    spec = scene.stage.spec(("/bin/true",), network="rules", network_keys=keys)
    child = await scene.stage.host.spawn(spec)
    assert child.failure is not None
    assert "layer 'netns' is missing: this machine has none" in child.failure.text


# spec NET9: nor does it start where nobody serves its names.
@pytest.mark.nobody
async def test_a_host_that_serves_no_names_refuses_the_start(stage: Stage) -> None:
    keys = NetworkSection(network=["example.com"])
    spec = stage.spec(
        ("/bin/true",), network="rules", network_keys=keys, sandbox=PROFILES["auto"]
    )
    child = await stage.host.spawn(spec)
    assert child.failure is not None
    assert "cannot keep the network's rules" in child.failure.text


# spec NET9, attack 18: a host that cannot take the sockets ends the child at once.
@pytest.mark.nobody
@pytest.mark.parametrize("room", [0, 5])
async def test_a_host_without_descriptors_for_the_sockets_refuses_the_start(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    receive = InnerListener.receive

    def received(inner: InnerListener) -> None:
        with no_descriptor_left(but=room):
            receive(inner)

    before = descriptors()
    keys = NetworkSection(network=["example.com"])
    spec = scene.stage.spec(("/bin/sleep", "60"), network="rules", network_keys=keys)
    with monkeypatch.context() as patched:
        patched.setattr(InnerListener, "receive", received)
        child = await scene.stage.host.spawn(spec)
    assert child.failure is not None
    assert "Too many open files" in child.failure.text
    await child.gone.wait()
    assert descriptors() == before


# spec NET10: a port of the host that is taken refuses the start, and nothing is left.
@pytest.mark.nobody
async def test_a_port_that_cannot_be_published_refuses_the_start(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        keys = NetworkSection(publish=[f"{port}:8000"])
        spec = scene.stage.spec(("/bin/sleep", "60"), network_keys=keys)
        before = descriptors()
        child = await scene.stage.host.spawn(spec)
        assert child.failure is not None
        assert child.failure.text == (
            f"cannot start a child: cannot publish at port {port} of 127.0.0.1: Address"
            " already in use; name another port"
        )
        await child.gone.wait()
        assert descriptors() == before


# spec NET1, NET4: as many ports as a child may have, and published ones beside them.
@pytest.mark.nobody
async def test_as_many_ports_as_there_may_be_are_handed_over(scene: Scene) -> None:
    ports = ",".join(map(str, range(9000, 9064)))
    puppet = await scene.puppet(f"example.com:{ports}", publish=["8000"])
    assert await puppet.do("listening('tcp6')") == [*range(9000, 9064)]
    await puppet.do("answers('example.com')")
    assert await puppet.do("ends('198.18.0.2', 9063)") == ("198.18.0.1", "198.18.0.2")


# spec NET4: a namespace without v6 has its listeners all the same.
def test_sockets_are_told_by_their_order_with_and_without_v6() -> None:
    settings = settings_from(NetworkSection(network=["a.example:53,80,3128"]))
    wanted, addresses, networks = order_of(settings)
    assert (len(addresses), networks) == (2, ())
    for has_v6 in (True, False):
        made = []
        ports = []
        for family, kind, _, port in wanted:
            if has_v6 or family == socket.AF_INET:
                made.append(socket.socket(family, kind))
                ports.append(port)
        by_number = dict(zip([one.fileno() for one in made], ports, strict=True))
        found = sockets_of(settings, made, has_v6=has_v6)
        try:
            assert by_number[found.dns_datagram.fileno()] == 53
            assert found.listeners[53][0] is found.dns_stream
            assert found.listeners[3128][0] is found.proxy
            for port, listeners in found.listeners.items():
                assert [by_number[one.fileno()] for one in listeners] == (
                    [port, port] if has_v6 else [port]
                )
            assert len(found.stock) == STOCK * (1 + has_v6)
            assert {by_number[one.fileno()] for one in found.stock} == {0}
        finally:
            found.close()
