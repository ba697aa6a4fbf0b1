"""The messages of the FS Proxy wire: small objects, never changed once made.

One request class for each command, ``Refusal`` (a line that is answered with an error
and touches no file) and ``Reply`` (a reply line, as a client reads it).  They carry no
behaviour; ``grammar`` says how each looks on the wire.  Names are bytes (spec O8).

Plain classes with slots, not dataclasses: a child imports this module, and importing
``dataclasses`` alone costs more than everything else a child needs.
"""

NO_FILENO = -1
"""The ``fileno`` of a WRITE whose fileno is no number (see ``Write``)."""


class Request:
    """Base of all requests; two of one class with equal fields are equal.

    Attributes:
        fields: the attributes that the message carries, in wire order.
        body: payload bytes that follow the request line.
        parts: the four lengths that an LLM_CHAT declares, refused or not: the LFs
            between them may be uncounted (``chat``, spec L1); empty for all others.
        recurs: the same line is likely to come again and again.
    """

    __slots__ = ()
    fields: tuple[str, ...] = ()
    body: int = 0
    parts: tuple[int, ...] = ()
    recurs = False

    def _values(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.fields)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Request) or type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash((type(self), self._values()))

    def __repr__(self) -> str:
        pairs = zip(self.fields, self._values(), strict=True)
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in pairs)})"


class Open(Request):
    """``OPEN``.

    Attributes:
        flag: the claim ``is_top_level``; None where a dialect 1 line names no context.
    """

    fields: tuple[str, ...] = ("name", "mode", "flag")
    __slots__ = ("flag", "mode", "name")
    recurs = True

    def __init__(self, name: bytes, mode: bytes, flag: bool | None) -> None:
        self.name = name
        self.mode = mode
        self.flag = flag


class FileRequest(Request):
    """A request about one open file.

    Attributes:
        fileno: the number of the open file.
        token: the number as the peer spelt it, for an error to echo (spec F5).
    """

    fields: tuple[str, ...] = ("token",)
    __slots__ = ("fileno", "token")

    def __init__(self, token: bytes) -> None:
        self.fileno = int(token)
        self.token = token


class Close(FileRequest):
    """``CLOSE``."""

    __slots__ = ()


class Sync(FileRequest):
    """``SYNC``: the file's data is on the disk when the reply comes."""

    __slots__ = ()


class SizedRequest(FileRequest):
    """A request about one open file and a number of bytes.

    Attributes:
        size: bytes to read or write, the new size, or the offset from the start.
    """

    fields: tuple[str, ...] = ("token", "size")
    __slots__ = ("size",)

    def __init__(self, token: bytes, size: int) -> None:
        self.fileno = int(token)
        self.token = token
        self.size = size


class Read(SizedRequest):
    """``READ``: at most ``size`` bytes from the handle's offset.

    Attributes:
        head: the reply line of a READ that answers all of ``size``, made once.
    """

    __slots__ = ("head",)
    recurs = True

    def __init__(self, token: bytes, size: int) -> None:
        self.fileno = int(token)
        self.token = token
        self.size = size
        self.head = b"OK %d\n" % size


class Write(SizedRequest):
    """``WRITE``: ``size`` payload bytes follow.

    A fileno that is no number does not refuse the line: the payload's cap is checked
    before the fileno (spec W6), and only the host knows the cap.  ``fileno`` is
    NO_FILENO then, which no open file has.
    """

    __slots__ = ("body", "head")
    recurs = True

    def __init__(self, token: bytes, size: int, fileno: int | None = None) -> None:
        self.fileno = int(token) if fileno is None else fileno
        self.token = token
        self.size = size
        self.body = size
        self.head = b"OK %d\n" % size


class Seek(SizedRequest):
    """``SEEK``: sets the handle's offset to ``size`` bytes from the start."""

    __slots__ = ()


class Truncate(SizedRequest):
    """``TRUNCATE``: sets the file's size."""

    __slots__ = ()


class NameRequest(Request):
    """A request about a name.

    Attributes:
        flag: the claim ``is_top_level``.
    """

    fields: tuple[str, ...] = ("flag", "name")
    __slots__ = ("flag", "name")

    def __init__(self, flag: bool, name: bytes) -> None:
        self.flag = flag
        self.name = name


class Stat(NameRequest):
    """``STAT``: size, modification time and kind of a name, as JSON."""

    __slots__ = ()


class ListDir(NameRequest):
    """``LIST``: the entries of a directory, as JSON."""

    __slots__ = ()


class MakeDir(NameRequest):
    """``MKDIR``."""

    __slots__ = ()


class Remove(NameRequest):
    """``REMOVE``: a file or an empty directory."""

    __slots__ = ()


class Rename(Request):
    """``RENAME``: both names follow as payload, old first, nothing between them."""

    fields: tuple[str, ...] = ("flag", "old_length", "new_length")
    __slots__ = ("body", "flag", "new_length", "old_length")

    def __init__(self, flag: bool, old_length: int, new_length: int) -> None:
        self.flag = flag
        self.old_length = old_length
        self.new_length = new_length
        self.body = old_length + new_length


class Narrow(Request):
    """``NARROW``: a JSON document of rights follows; they can only shrink (spec A5)."""

    fields: tuple[str, ...] = ("size",)
    __slots__ = ("body", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.body = size


class Chat(Request):
    """``LLM_CHAT``: four byte strings follow, concatenated (spec L1)."""

    fields: tuple[str, ...] = ("flag", "inputs", "outputs", "prompt", "preset")
    __slots__ = ("body", "flag", "inputs", "outputs", "parts", "preset", "prompt")

    def __init__(
        self, flag: bool, inputs: int, outputs: int, prompt: int, preset: int
    ) -> None:
        self.flag = flag
        self.inputs = inputs
        self.outputs = outputs
        self.prompt = prompt
        self.preset = preset
        self.parts = (inputs, outputs, prompt, preset)
        self.body = sum(self.parts)


class FdCall(Request):
    """``FD_CALL``: a JSON call of an LLM fd tool follows.

    Attributes:
        size: payload bytes.
    """

    fields: tuple[str, ...] = ("size",)
    __slots__ = ("body", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.body = size


class FdPut(Request):
    """``FD_PUT``: a piece of content follows.

    Attributes:
        size: payload bytes.
        token: the content that the piece is appended to; None begins a new one.
    """

    fields: tuple[str, ...] = ("size", "token")
    __slots__ = ("body", "size", "token")

    def __init__(self, size: int, token: bytes | None = None) -> None:
        self.size = size
        self.token = token
        self.body = size


class Ping(Request):
    """``PING``."""

    __slots__ = ()


class Caps(Request):
    """``CAPS``: version, commands, limits and rights, as JSON."""

    __slots__ = ()


class Attach(Request):
    """``ATTACH``: one more connection, sent as a descriptor (spec N4)."""

    __slots__ = ()


class Quota(Request):
    """``LLM_QUOTA``."""

    __slots__ = ()


class Config(Request):
    """``LLM_CONFIG``."""

    __slots__ = ()


class Refusal(Request):
    """A request line that is answered with an error and does nothing.

    Attributes:
        reply: the whole reply line, LF included.
        body: payload to drain before the reply (spec W4).
        token: a fileno to look up first: the error of a file that is not open comes
            before this one (spec R2); None where there is none.
    """

    fields: tuple[str, ...] = ("reply", "body", "token", "parts")
    __slots__ = ("body", "parts", "reply", "token")

    def __init__(
        self,
        reply: bytes,
        body: int = 0,
        token: bytes | None = None,
        parts: tuple[int, ...] = (),
    ) -> None:
        self.reply = reply
        self.body = body
        self.token = token
        self.parts = parts


class Reply:
    """One reply line, as a client reads it.

    Attributes:
        ok: whether the line began with ``OK``.
        text: the rest of the line: an error's message, or the status.
        number: the first number after ``OK``, else 0.
        body: bytes that follow the line.
    """

    __slots__ = ("body", "number", "ok", "text")

    def __init__(self, ok: bool, text: bytes, number: int = 0, body: int = 0) -> None:
        self.ok = ok
        self.text = text
        self.number = number
        self.body = body

    def __repr__(self) -> str:
        return f"Reply({self.ok}, {self.text!r}, {self.number}, {self.body})"
