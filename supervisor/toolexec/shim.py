"""Shims: commands with a tool's name that let the host run the tool.

1. A shim is POSIX sh and curl. Output goes to stdout as it comes; the exit code is the
   trailer's, 1 without a trailer.
2. curl runs in the background: a signal goes to the tool by ``/signal`` at once, and
   its last output is still shown. curl ignores SIGINT and SIGQUIT of the terminal.
3. curl reads the token from a file that other users cannot read.
4. A shim replaces only a shim.
5. A shim never calls a shim: it removes its directory from PATH, and a shim of a second
   directory runs the command of its own name instead.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from hostlib.messages import remedy
from supervisor.toolexec.kinds import is_tool_name

if TYPE_CHECKING:
    from collections.abc import Iterable

MARK = "# sandhost shim"
"""The beginning of a shim's second line, which no other file has."""

_MODE = 0o755
_LOOK_BYTES = 64

_BODY = r"""
# Runs the tool of this file's name through ToolExec, in the current directory.
# AIFO_TOOLEEXEC_URL and AIFO_TOOLEEXEC_TOKEN say where and as whom.

fail() { printf '%s: %s\n' "$name" "$1" >&2; exit 1; }

# A shim calls no shim: its own directory leaves its PATH. One that is called by another
# shim all the same is the command of its name that comes next.
own=${0%/*}
[ "$own" != "$0" ] || own=.
before=$PATH rest=${PATH:+$PATH:} path=
while [ -n "$rest" ]; do
  dir=${rest%%:*} rest=${rest#*:}
  [ "${dir:-.}" -ef "$own" ] || path=$path:$dir
done
PATH=${path#:}
if [ -n "${SANDHOST_SHIM:-}" ]; then
  [ "$PATH" != "$before" ] || fail 'a shim is called by a shim, and nothing else is found'
  exec "$name" "$@"
fi
SANDHOST_SHIM=$name
export SANDHOST_SHIM

url=${AIFO_TOOLEEXEC_URL:-}
[ -n "$url" ] || fail 'AIFO_TOOLEEXEC_URL is not set: no host runs tools here'
[ -n "${AIFO_TOOLEEXEC_TOKEN:-}" ] || fail 'AIFO_TOOLEEXEC_TOKEN is not set'
command -v curl >/dev/null 2>&1 || fail 'curl is not installed'

# -q: no ~/.curlrc; the host is never behind a proxy.
ask() {
  if [ -n "$socket" ]; then set -- --unix-socket "$socket" "$@"; fi
  exec curl -q -sS --noproxy '*' -H "@$tmp/a" -H 'X-Aifo-Proto: 2' "$@"
}

forward() {
  if [ -z "$pid" ]; then early=$1; return; fi
  tries=0
  while kill -0 "$pid" 2>/dev/null; do
    if ( ask -f -o /dev/null --data-urlencode "exec_id=$id" -d "signal=$1" \
         "$base/signal" ) 2>/dev/null; then return; fi
    # Not known yet, or not any more: then curl is about to end.
    tries=$((tries + 1))
    if [ "$tries" -gt 3 ]; then kill "$pid" 2>/dev/null; return; fi
    sleep 1
  done
}

# Before the first file is made: a signal ends nothing halfway. One that comes before the
# tool is asked for ends the shim then; one that comes before curl runs is forwarded to it
# later. mktemp, of the same group, tells the name of its file.
pid= early= again= tmp=
trap 'trap "" INT QUIT TERM HUP; [ -z "$tmp" ] || rm -rf "$tmp"' EXIT
trap 'again=1; forward INT' INT
trap 'again=1; forward QUIT' QUIT
trap 'again=1; forward TERM' TERM
trap 'again=1; forward HUP' HUP
tmp=$(trap '' INT QUIT TERM HUP; mktemp -d "${TMPDIR:-/tmp}/sandhost-shim.XXXXXX") ||
  fail 'no temporary directory'
( trap '' INT QUIT TERM HUP
  umask 077
  printf 'Authorization: Bearer %s\n' "$AIFO_TOOLEEXEC_TOKEN" >"$tmp/a" ) ||
  fail 'cannot write to the temporary directory'

case $url in
unix://*) socket=${url#unix://}; url=http://localhost/exec ;;
*) socket= ;;
esac
base=${url%/exec}
id=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')

for arg do
  shift
  set -- "$@" --data-urlencode "arg=$arg"
done
if [ "$endpoint" = exec ]; then
  set -- --data-urlencode "cwd=$PWD" -H "X-Aifo-Exec-Id: $id" "$@"
fi
case $early in
INT) exit 130 ;;
QUIT) exit 131 ;;
TERM) exit 143 ;;
HUP) exit 129 ;;
esac
# bash does not have it ignore INT and QUIT by itself where they have a trap.
( trap '' INT QUIT
  ask --no-buffer -D "$tmp/h" -H 'TE: trailers' \
    --data-urlencode "$field=$name" "$@" "$base/$endpoint" 2>"$tmp/e" ) &
pid=$!
if [ -n "$early" ]; then forward "$early"; fi
again=1
while [ -n "$again" ]; do
  again=
  wait "$pid" 2>/dev/null
  ended=$?
done
# 23: cannot write. The reader of a pipe may stop, as head does: that is no error.
[ "$ended" -eq 23 ] && [ -p /dev/stdout ] || cat "$tmp/e" >&2

# The trailer stands at the end of the headers; before it there may be one of a v1 reply.
code=
cr=$(printf '\r')
if [ -r "$tmp/h" ]; then
  while IFS= read -r line; do
    case $line in
    [Xx]-[Ee][Xx][Ii][Tt]-[Cc][Oo][Dd][Ee]:*)
      code=${line#*:}; code=${code%"$cr"}; code=${code# } ;;
    esac
  done <"$tmp/h"
fi
case $code in
''|*[!0-9]*|????*) exit 1 ;;
esac
exit "$code"
"""


class ShimError(Exception):
    """A shim cannot be installed; one line with the reason."""


def shim_text(name: str, *, notify: bool = False) -> str:
    """Return the shim of a tool.

    Args:
        name: the tool's.
        notify: whether it is the notification command, run by ``/notify``.
    """
    endpoint, field = ("notify", "cmd") if notify else ("exec", "tool")
    head = f"#!/bin/sh\n{MARK}: {endpoint} {name}\n"
    return f"{head}name={name} endpoint={endpoint} field={field}\n{_BODY}"


def install(
    directory: str, tools: Iterable[str], *, notify: str | None = None
) -> list[str]:
    """Install shims into a directory, which is made if it is missing.

    Args:
        directory: gets the shims.
        tools: one shim each.
        notify: the name of the notification command; None for none.

    Returns:
        The names of the installed shims.

    Raises:
        ShimError: a name is no tool's, or another file has it, or the directory cannot
            be written; shims installed before stay.
    """
    shims = {name: shim_text(name) for name in _check_names(tools)}
    for name in _check_names([notify] if notify is not None else []):
        shims[name] = shim_text(name, notify=True)
    try:
        os.makedirs(directory, exist_ok=True)  # noqa: PTH103 - a str
        dir_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as why:
        raise ShimError(
            f"cannot use {directory!r}: {why.strerror}{remedy(why)}"
        ) from None
    try:
        for name in shims:
            _check_replaceable(dir_fd, directory, name)
        for name, text in shims.items():
            _write(dir_fd, directory, name, text)
    finally:
        os.close(dir_fd)
    return sorted(shims)


def _check_names(names: Iterable[str]) -> list[str]:
    found = sorted(set(names))
    for name in found:
        if not is_tool_name(name):
            text = f"not the name of a tool: {name!r}; no path, no blank, no option"
            raise ShimError(text)
    return found


def _check_replaceable(dir_fd: int, directory: str, name: str) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    except OSError:
        start = b""
    else:
        with os.fdopen(fd, "rb") as file:
            regular = stat.S_ISREG(os.fstat(fd).st_mode)
            start = file.read(_LOOK_BYTES) if regular else b""
    if not start.startswith(b"#!/bin/sh\n" + MARK.encode()):
        where = f"{directory}/{name}"
        raise ShimError(f"{where!r} is there and is no shim; choose another directory")


def _write(dir_fd: int, directory: str, name: str, text: str) -> None:
    """Replace a shim at one instant: a shell may be reading the old one."""
    fresh = f".{name}.{os.urandom(6).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(fresh, flags, _MODE, dir_fd=dir_fd)
        try:
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(text)
                os.fchmod(fd, _MODE)
            os.rename(fresh, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(fresh, dir_fd=dir_fd)
            raise
    except OSError as why:
        raise ShimError(
            f"cannot write '{directory}/{name}': {why.strerror}{remedy(why)}"
        ) from None
