"""Hypothesis strategies for the wire: messages, lines good and bad, whole streams."""

from hypothesis import strategies as st

from protocol import COMMANDS, MODES, messages
from protocol.grammar import format_request
from protocol.limits import MAX_LINE_BYTES

numbers = st.integers(0, 10**18 - 1)
small = st.integers(0, 40)
tokens = st.one_of(
    numbers.map(lambda number: b"%d" % number),
    st.from_regex(rb"\A[0-9]{1,18}\Z"),
)
# Names without LF, and without bytes at their ends that the wire strips (spec F1).
names = st.binary(min_size=1, max_size=40).filter(
    lambda name: b"\n" not in name and name == name.strip(b" \t\r")
)
flags = st.booleans()


def requests(
    lengths: st.SearchStrategy[int] = numbers,
) -> st.SearchStrategy[messages.Request]:
    """Return requests of every command; ``lengths`` are those of payloads."""
    plain = (
        messages.Ping,
        messages.Caps,
        messages.Attach,
        messages.Quota,
        messages.Config,
    )
    return st.one_of(
        st.builds(messages.Open, names, st.sampled_from(MODES), flags),
        *(st.builds(kind, tokens) for kind in (messages.Close, messages.Sync)),
        *(
            st.builds(kind, tokens, numbers)
            for kind in (messages.Read, messages.Seek, messages.Truncate)
        ),
        st.builds(messages.Write, tokens, lengths),
        *(
            st.builds(kind, flags, names)
            for kind in (
                messages.Stat,
                messages.ListDir,
                messages.MakeDir,
                messages.Remove,
            )
        ),
        st.builds(messages.Rename, flags, lengths, lengths),
        *(st.builds(kind, lengths) for kind in (messages.Narrow, messages.FdCall)),
        st.builds(
            messages.FdPut, lengths, st.none() | st.from_regex(rb"\A[a-z0-9]{1,9}\Z")
        ),
        st.builds(
            messages.Chat,
            flags,
            *(st.integers(0, 2_000_000) if lengths is numbers else lengths,) * 4,
        ),
        *(st.builds(kind) for kind in plain),
    )


@st.composite
def whole_requests(draw: st.DrawFn) -> bytes:
    """Draw a request line with its whole payload, which may look like requests."""
    request = draw(requests(small))
    body = draw(st.binary(min_size=request.body, max_size=request.body))
    return format_request(request) + body


words = st.sampled_from(
    [
        *COMMANDS,
        *MODES,
        *(b"true", b"false", b"user", b"internal", b"open", b"maybe", b"name"),
        *(b"0", b"5", b"1000", b"0007", b"-1", b"+1", b"1_0", b"0x10", b"9" * 19),
        *(b"\xd9\xa1", b"\x1b[31m", b"\x00", b"\x0b", b"\x0c", b"\r", b"x" * 300),
    ]
)
blanks = st.sampled_from([b" ", b" ", b" ", b"\t", b"  ", b" \t "])


@st.composite
def word_lines(draw: st.DrawFn) -> bytes:
    """Draw a line of words of the language in any order."""
    line = draw(st.sampled_from([b"", b"", b" ", b"\t"]))
    for word in draw(st.lists(words, max_size=8)):
        line += word + draw(blanks)
    return line + draw(st.sampled_from([b"\n", b"\n", b"\r\n", b" \r\n", b"\r \n"]))


@st.composite
def long_lines(draw: st.DrawFn) -> bytes:
    """Draw a line about as long as the limit (spec F4)."""
    size = MAX_LINE_BYTES + draw(st.integers(-2, 12))
    begin = draw(st.sampled_from([b"", b"OPEN ", b"WRITE 1000 5 ", b"READ"]))
    return begin + b"x" * (size - len(begin)) + b"\n"


garbage = st.binary(max_size=60)

streams = st.lists(
    st.one_of(whole_requests(), whole_requests(), word_lines(), garbage), max_size=12
).map(b"".join)


class LongStream(bytes):
    """A stream that is shown in part, for a report should stay readable."""

    __slots__ = ()

    def __repr__(self) -> str:
        lines = [line[:40] + b"..." * (len(line) > 40) for line in self.split(b"\n")]
        return f"{lines} ({len(self):,} bytes)"


long_streams = st.lists(
    st.one_of(whole_requests(), long_lines(), garbage), max_size=5
).map(lambda pieces: LongStream(b"".join(pieces)))

sizes = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 80)), max_size=60)
long_sizes = st.lists(st.integers(0, 70_000), max_size=12)
