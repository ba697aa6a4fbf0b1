"""``sandhost llm ...``: the model behind FD 3, for shell scripts inside a child.

1. It starts as fast as ``sandhost fs``: it parses arguments by hand.
2. A call runs on a connection of its own if the host gives one: other processes of the
   child can use FD 3 meanwhile, and a kill of this one ends the call (spec L10).  With
   ``PRESET@NAME`` it runs on FD 3, for a conversation ends with its connection (spec L5,
   T5).
3. ``-`` is this process's own standard input or output: the text is read here and sent
   in the prompt, for the host cannot read a child's stdin (spec L3).
"""

from __future__ import annotations

from vfs.client.shell.frame import (
    OK,
    Door,
    UsageError,
    own_connection,
    pieces,
    quote,
    run,
    write,
)
from vfs.client.turn import client_errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vfs.client import Client

HELP = """\
usage: sandhost llm chat [-p PROMPT] [-i FILE]... [-o FILE]... [-r PRESET] [--json]
       sandhost llm quota
       sandhost llm config

The model that the host asks for this child; key and quota stay with the host.

  -p, --prompt TEXT    what to do
  -i, --input FILE     the host reads it into the message; - is standard input
  -o, --output FILE    the host writes the answer to it; - is standard output,
                       where the answer goes if there is no -o at all
  -r, --preset NAME    system prompt: general, data_proc, code_review, diff_patch, or
                       what the host's configuration adds; NAME@WORD goes on with
                       the conversation WORD of this child, on FD 3 itself: the
                       child's other requests wait for the answer
  --json               print the whole completion
  --top-level          ask for the top-level view (files and model)
  --restricted         ask for the restricted view (neither: $FSPROXY_TOP_LEVEL)

example: sandhost fs cat log.txt | sandhost llm chat -p 'What failed?' -i -

exit status: 0 done, 1 something failed, 2 wrong usage or not in a child
"""

_WITH_VALUE = {
    "-p": "prompt",
    "--prompt": "prompt",
    "-i": "input",
    "--input": "input",
    "-o": "output",
    "--output": "output",
    "-r": "preset",
    "--preset": "preset",
}


class LlmCall:
    """A parsed command line."""

    __slots__ = ("as_json", "given", "top_level")

    def __init__(self) -> None:
        self.given: dict[str, list[str]] = {
            "prompt": [],
            "input": [],
            "output": [],
            "preset": [],
        }
        self.as_json = False
        self.top_level: bool | None = None


def help_text() -> str:
    """Return the text of ``--help``."""
    return HELP


def main(argv: list[str]) -> int:
    """Run ``sandhost llm`` with the arguments after ``llm``; return the exit status."""
    return run("llm", _run, argv)


def _run(argv: list[str]) -> int:
    word = argv[0] if argv else ""
    if not {"--help", "-h", "help"}.isdisjoint(argv[:2]):
        write(HELP.encode())
        return OK
    if word == "chat":
        return _chat(_read(argv[1:]))
    if word in ("quota", "config"):
        if argv[1:] not in ([], ["--json"]):
            raise UsageError(f"{word} takes no arguments")
        return _tell(word)
    raise UsageError(f"unknown command {quote(word)}" if argv else "no command")


def _read(arguments: list[str]) -> LlmCall:
    call = LlmCall()
    rest = iter(arguments)
    for argument in rest:
        if argument in _WITH_VALUE:
            kind = _WITH_VALUE[argument]
            value = next(rest, None)
            if value is None:
                raise UsageError(f"{argument} needs a value")
            call.given[kind].append(value)
        elif argument in ("--top-level", "--restricted"):
            call.top_level = argument == "--top-level"
        elif argument == "--json":
            call.as_json = True
        else:
            raise UsageError(f"unknown argument {quote(argument)} for chat")
    for kind in ("prompt", "preset"):
        if len(call.given[kind]) > 1:
            raise UsageError(f"--{kind} is given twice")
    return call


def _chat(call: LlmCall) -> int:
    inputs, outputs = call.given["input"], call.given["output"]
    prompt = "".join(call.given["prompt"])
    preset = "".join(call.given["preset"])
    client: Client = Door("llm")
    if "@" not in preset:  # rule 2
        client = own_connection(client)
    if "-" in inputs:
        text = _stdin()
        prompt = f"{prompt}\n\n{text}" if prompt else text
    body, _ = client.llm_chat_json(
        prompt,
        preset=preset,
        input_files=[name for name in inputs if name != "-"],
        output_files=[name for name in outputs if name != "-"],
        top_level=call.top_level,
    )
    if call.as_json:
        write(body + b"\n")
    elif not outputs or "-" in outputs:
        text = _text_of(body)
        write(text.encode() + (b"" if text.endswith("\n") else b"\n"))
    return OK


def _text_of(body: bytes) -> str:
    from vfs.client.decode import mapping  # noqa: PLC0415 - as the client does

    match mapping(body):
        case {"choices": [{"message": {"content": str(text)}}, *_]}:
            return text
        case _:
            raise client_errors().unreadable("LLM_CHAT", body)


def _tell(word: str) -> int:
    client = Door("llm")
    if word == "quota":
        write(client.llm_quota().encode() + b"\n")
        return OK
    write(client.llm_config_json() + b"\n")
    return OK


def _stdin() -> str:
    data = b"".join(pieces())
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UsageError("standard input is not UTF-8") from None
