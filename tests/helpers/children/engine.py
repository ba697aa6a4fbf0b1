"""A stand-in for docker and podman: containers that are only records.

argv: a command of the engine. `$HOME` holds one directory for each container: `record`,
and `stopped`, a FIFO that `wait` reads and `rm` ends. A command in a container is run
here, in the mounted directory and in a session of its own: signals do not get there, what
`exec` is given to read does, and its end. Every call is appended to `$HOME/calls`. While
`$HOME/broken` is there nothing is started, while `restarting` is, nothing is run.
"""
# ruff: noqa: T201, S606

import json
import os
import select
import shutil
import sys
from contextlib import suppress
from typing import Any

HOME = os.environ["HOME"]


def at(name: str, *rest: str) -> str:
    return os.path.join(HOME, "containers", name, *rest)


def value(words: list[str], option: str) -> list[str]:
    return [words[i + 1] for i, word in enumerate(words) if word == option]


def run(words: list[str]) -> None:
    if os.path.exists(os.path.join(HOME, "broken")):
        sys.exit("Error: no such image\n")
    name = value(words, "--name")[0]
    os.makedirs(at(name))
    os.mkfifo(at(name, "stopped"))
    mount, _, where = value(words, "-v")[0].rpartition(":")
    assert where == "/workspace"
    record = {
        "label": value(words, "--label")[0].partition("=")[2],
        "mount": mount,
        "env": dict(pair.split("=", 1) for pair in value(words, "-e")),
    }
    with open(at(name, "record"), "w", encoding="utf-8") as file:
        json.dump(record, file)
    print("0123456789ab")


def record_of(name: str) -> Any:
    with open(at(name, "record"), encoding="utf-8") as file:
        return json.load(file)


def execute(words: list[str]) -> None:
    if os.path.exists(os.path.join(HOME, "restarting")):
        sys.exit("Cannot connect to the Docker daemon. Is the docker daemon running?\n")
    flags: list[str] = []
    cwd = "/workspace"
    while words[0].startswith("-"):
        flags.append(words.pop(0))
        if flags[-1] == "-w":
            cwd = words.pop(0)
    name, *command = words
    found = record_of(name)
    os.chdir(found["mount"] + cwd.removeprefix("/workspace"))
    env = {"PATH": os.environ["PATH"], "IN_CONTAINER": name, **found["env"]}
    if "-i" not in flags:
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    theirs, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()  # as an engine does
        os.dup2(theirs, 0)
        os.closerange(3, 64)
        os.execvpe(command[0], command, env)
    os.close(theirs)
    relay(os.pidfd_open(pid), ours)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(128 - code if code < 0 else code)


def relay(process: int, line: int) -> None:
    """Hand on what there is to read until a process ends."""
    sources = [0, process]
    while True:
        ready, _, _ = select.select(sources, [], [])
        if process in ready:
            return
        data = os.read(0, 4096)
        if data:
            os.write(line, data)
        else:
            os.close(line)
            sources.remove(0)


def wait(name: str) -> None:
    with open(at(name, "stopped"), "rb") as fifo:
        fifo.read()
    print(0)


def remove(name: str) -> None:
    if not os.path.exists(at(name)):
        return
    with suppress(OSError):  # the caller does not wait
        os.close(os.open(at(name, "stopped"), os.O_WRONLY | os.O_NONBLOCK))
    shutil.rmtree(at(name))


def names() -> None:
    where = os.path.join(HOME, "containers")
    for name in sorted(os.listdir(where)) if os.path.isdir(where) else ():
        print(name + "\t" + record_of(name)["label"])


with open(os.path.join(HOME, "calls"), "a", encoding="utf-8") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\n")
verb, *rest = sys.argv[1:]
if verb == "run":
    run(rest)
elif verb == "exec":
    execute(rest)
elif verb == "wait":
    wait(rest[0])
elif verb == "rm":
    remove(rest[1])
elif verb == "ps":
    names()
else:
    sys.exit("unknown command")
