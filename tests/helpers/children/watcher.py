"""Looks into every process that execs beneath a launchpad of the tests.

It stands outside: the processes know nothing of it. The kernel tells it of each fork and
exec of the machine (proc connector, for root; Linux `cn_proc.h`), and where it does not, it
walks down from the tests' process again and again, and misses who is quick. Of each child it
looks at the environment, the arguments, the name, and where its descriptors, its working
directory and its program lead.

stdin: one JSON object with `pid` (of the tests' process) and `forms` (hexadecimal: what to
look for, which so stands in no command line and no environment); its end ends this program.
stdout: a line `watching events` or `watching walks`, a JSON text for each place where a form
was found, and last an object with the figures `children`, `missed` and `bytes`.
"""

import ctypes
import json
import os
import select
import socket
import struct
import sys
import time
from contextlib import suppress

# linux/netlink.h, linux/connector.h, linux/cn_proc.h
NETLINK_CONNECTOR = 11
CN_IDX_PROC, CN_VAL_PROC, PROC_CN_MCAST_LISTEN = 1, 1, 1
PROC_EVENT_NONE, PROC_EVENT_FORK, PROC_EVENT_EXEC = 0, 1, 2
NLMSG_DONE = 3
SO_ATTACH_FILTER, SO_RCVBUFFORCE = 26, 33
HEAD_BYTES = 36  # of netlink and of the connector
EVENT = struct.Struct("=IIQ")  # event, cpu, time

ROOM_BYTES = 16 << 20
"""For what comes while this program has no turn."""

WALK_S = 0.02

LAUNCHPAD = b"supervisor.spawn.launchpad.main"
"""In the arguments of a launchpad, and of nobody else."""


class Watcher:
    """Processes of the tests, children, and the findings in these."""

    def __init__(self, pid: int, forms: list[bytes]) -> None:
        self.own = {pid}
        self.children: set[int] = set()
        self.forms = forms
        self.seen = self.missed = self.bytes = 0

    def event(self, event: bytes) -> None:
        """Take what the kernel tells: a fork, an exec, or what is of no interest."""
        what = EVENT.unpack_from(event)[0]
        if what == PROC_EVENT_FORK:
            _, parent, pid, child = struct.unpack_from("=IIII", event, EVENT.size)
            if pid == child:  # else it is a thread, and told to be its grandparent's
                self.fork(parent, child)
        elif what == PROC_EVENT_EXEC:
            self.exec(struct.unpack_from("=II", event, EVENT.size)[1])

    def fork(self, parent: int, child: int) -> None:
        """Take a new process for what its parent is; a number may have been another's."""
        for group in (self.own, self.children):
            (group.add if parent in group else group.discard)(child)

    def exec(self, pid: int) -> None:
        """Look into a process that has become another program."""
        if pid in self.own and LAUNCHPAD in _read(pid, "cmdline"):
            self.own.discard(pid)
            self.children.add(pid)
        if pid in self.children:
            self.look(pid)

    def look(self, pid: int) -> None:
        """Search what is shown of a child."""
        arguments = _read(pid, "cmdline")
        if not arguments:
            self.missed += 1
            return
        self.seen += 1
        shown = {name: _read(pid, name) for name in ("environ", "comm")}
        shown |= {"cmdline": arguments, "links": _links(pid)}
        for name, text in shown.items():
            self.bytes += len(text)
            if any(form in text for form in self.forms):
                say(f"{name} of {arguments[:80]!r}")

    def walk(self, known: set[tuple[int, bytes]]) -> None:
        """Look into whoever is beneath the tests' process and was not looked into."""
        left = [(pid, False) for pid in tuple(self.own)]
        while left:
            pid, is_child = left.pop()
            arguments = _read(pid, "cmdline")
            is_child = is_child or LAUNCHPAD in arguments
            if is_child and arguments and (pid, arguments) not in known:
                known.add((pid, arguments))
                self.look(pid)
            with suppress(OSError):
                for task in os.listdir(f"/proc/{pid}/task"):
                    children = _read(pid, f"task/{task}/children").split()
                    left += [(int(child), is_child) for child in children]


def say(what: object) -> None:
    """Write one line."""
    os.write(1, json.dumps(what).encode() + b"\n")


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.readall()
    except OSError:
        return b""


def _links(pid: int) -> bytes:
    found = []
    with suppress(OSError):
        names = [f"fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")]
        for name in (*names, "cwd", "exe"):
            with suppress(OSError):
                found.append(os.fsencode(os.readlink(f"/proc/{pid}/{name}")))
    return b"\n".join(found)


def subscribed() -> socket.socket | None:
    """Ask the kernel for events; None if it does not give them to this process."""
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_CONNECTOR)
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, ROOM_BYTES)
        sock.bind((0, CN_IDX_PROC))
        word = struct.pack("=I", PROC_CN_MCAST_LISTEN)
        body = struct.pack("=IIIIHH", CN_IDX_PROC, CN_VAL_PROC, 0, 0, len(word), 0)
        length = 16 + len(body) + len(word)
        sock.send(struct.pack("=IHHII", length, NLMSG_DONE, 0, 0, 0) + body + word)
        # The kernel answers whom it listens to (PROC_EVENT_NONE with an error of 0).
        while select.select([sock], [], [], 1.0)[0]:
            event = sock.recv(4096)[HEAD_BYTES:]
            if EVENT.unpack_from(event)[0] == PROC_EVENT_NONE:
                if struct.unpack_from("=I", event, EVENT.size)[0] == 0:
                    narrow(sock)
                    return sock
                break
    except OSError:
        pass
    sock.close()
    return None


def narrow(sock: socket.socket) -> None:
    """Have the kernel tell of nothing but forks of processes and execs: half of it.

    Each worker of the tests has a watcher, and the kernel tells each of every process.
    """
    what, fork_pid, fork_tgid = HEAD_BYTES, HEAD_BYTES + 24, HEAD_BYTES + 28
    load, tax, equal, same, end = 0x20, 0x07, 0x15, 0x1D, 0x06  # linux/bpf_common.h
    steps = (
        (load, 0, 0, what),
        (equal, 5, 0, socket.htonl(PROC_EVENT_EXEC)),
        (equal, 0, 5, socket.htonl(PROC_EVENT_FORK)),
        (load, 0, 0, fork_pid),
        (tax, 0, 0, 0),
        (load, 0, 0, fork_tgid),
        (same, 0, 1, 0),
        (end, 0, 0, 0xFFFFFFFF),
        (end, 0, 0, 0),
    )
    program = b"".join(struct.pack("=HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(program)
    told = struct.pack("HL", len(steps), ctypes.addressof(held))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, told)


def by_events(watcher: Watcher, sock: socket.socket) -> None:
    """Look into whoever the kernel tells of, until stdin ends and all is told."""
    is_last = False
    while True:
        sources: list[socket.socket | int] = [sock] if is_last else [sock, 0]
        ready = select.select(sources, [], [], 0.0 if is_last else None)[0]
        if 0 in ready:
            is_last = not os.read(0, 1)
        if sock not in ready:
            if is_last:
                return
            continue
        try:
            event = sock.recv(4096)[HEAD_BYTES:]
        except OSError:  # ENOBUFS: more than ROOM_BYTES; some are missed
            watcher.missed += 1
            continue
        watcher.event(event)


def by_walks(watcher: Watcher) -> None:
    """Walk until stdin ends."""
    known: set[tuple[int, bytes]] = set()
    pause_s = WALK_S
    while not select.select([0], [], [], pause_s)[0]:
        start = time.monotonic()
        watcher.walk(known)
        pause_s = max(WALK_S, 10 * (time.monotonic() - start))  # a tenth of the time
    watcher.walk(known)


def main() -> None:
    """Go on without the process that started this, and watch until stdin ends."""
    if os.fork():
        os._exit(0)
    os.setsid()
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 65_536)
    order = json.loads(line)
    watcher = Watcher(order["pid"], [bytes.fromhex(form) for form in order["forms"]])
    sock = subscribed() if "--walk" not in sys.argv else None
    say("watching walks" if sock is None else "watching events")
    if sock is None:
        by_walks(watcher)
    else:
        by_events(watcher, sock)
    say({"children": watcher.seen, "missed": watcher.missed, "bytes": watcher.bytes})


main()
