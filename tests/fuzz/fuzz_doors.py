"""Coverage-guided fuzzing of the model's doors.

Requests, answers, and what is blotted out.

    python tests/fuzz/fuzz_doors.py [-max_total_time=60] [libFuzzer options] [CORPUS]
    python tests/fuzz/fuzz_doors.py --replay CORPUS

An input's first byte chooses a check. A request is one that a real program could send,
with some of it changed: what the strict reader takes, other readers read the same; it is
sent on or translated, or refused by an error of its own. An answer is one of the stand-in,
with events left out, repeated, swapped and changed: cut anywhere, a child gets the same of
it, in the order of its API, and no key is in it. At the end it says how many inputs there were,
and the longest time that one of them would have kept the host from all else. Coverage makes
each turn several times as long: `--replay` runs the inputs of a directory without it.
"""

import base64
import gc
import json
import sys
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.fuzz.door_answers import check_answer, check_bytes  # noqa: E402 - beneath ROOT
from tests.fuzz.door_requests import check_request  # noqa: E402
from tests.fuzz.door_turns import told_at_the_end, turns  # noqa: E402
from tests.fuzz.door_words import BASE64, KEY, redactor  # noqa: E402
from tests.fuzz.fuzz_protocol import Plan  # noqa: E402

MISSING = (
    "fuzz_doors: cannot fuzz: atheris is not installed: `make fuzz` installs it,"
    " where there is a wheel of it for this platform and this Python\n"
)

TEXTS = (
    KEY, KEY[:5], KEY[5:], KEY[:-1], KEY[-1:], BASE64, BASE64[:9], BASE64[9:], "%", "\\",
    "".join(f"%{byte:02x}" for byte in KEY.encode()), "%2", "\\u00", "\\/", "%2F", "%2B",
    "".join(f"\\u{ord(char):04x}" for char in KEY), json.dumps(KEY)[1:-1], "s", "k", "-",
    base64.b64encode(b"a" + KEY.encode()).decode(), "[redacted]", "[", " ", "a",
    base64.urlsafe_b64encode(b"ab" + KEY.encode()).decode(), "+", "/", "\U0001f600",
)  # fmt: skip


def check_redactor(plan: Plan) -> None:
    """Blot the key out of a text in one piece and in many."""
    from hostlib.redact import StreamRedactor  # noqa: PLC0415

    sizes = [1 + plan.byte() % 24 for _ in range(plan.byte() % 24)]
    text = ""
    while not plan.is_over:
        choice = plan.byte()
        if choice < 224:
            text += TEXTS[choice % len(TEXTS)]
        else:
            text += chr(plan.byte())
    whole = redactor().text(text)
    assert not shows_key(whole)
    stream = StreamRedactor(redactor())
    passed = []
    for size in sizes:
        passed.append(stream.feed(text[:size]))
        text = text[size:]
    passed += [stream.feed(text), stream.rest()]
    found = "".join(passed)
    assert not shows_key(found)
    assert found == whole, "cut, it is another text"


def shows_key(text: str) -> bool:
    """Tell whether a text gives the key away, as it is or encoded."""
    return KEY in text or KEY in unquote(text) or BASE64[3:-3] in text


CHECKS = (
    check_request,
    check_request,
    check_answer,
    check_answer,
    check_bytes,
    check_redactor,
)


def check(data: bytes) -> None:
    """Run one input; raise if something is found."""
    plan = Plan(data)
    turns().begin()
    CHECKS[plan.byte() % len(CHECKS)](plan)


def replay(corpus: Path) -> int:
    """Run the inputs of a directory as they are; say what was counted."""
    import supervisor.llm.endpoint_call  # noqa: F401, PLC0415

    gc.collect()
    gc.freeze()
    for one in sorted(corpus.iterdir()):
        check(one.read_bytes())
    sys.stdout.write(f"{turns().said()}\n")
    return 0


def main(argv: list[str]) -> int:
    """Fuzz until libFuzzer ends; return its exit status, or 2 if it cannot be started."""
    if argv[1:2] == ["--replay"]:
        return replay(Path(argv[2]))
    try:
        import atheris  # noqa: PLC0415 - not on every platform
    except ImportError:
        sys.stderr.write(MISSING)
        return 2
    # Only what is imported here is instrumented, so nothing above imports the package.
    with atheris.instrument_imports(include=["supervisor.llm"]):
        import supervisor.llm.endpoint_call  # noqa: F401, PLC0415
    # A full collection would look at all that is imported, in some turn.
    gc.collect()
    gc.freeze()
    atheris.Setup([argv[0], "-max_len=1024", *argv[1:]], check)
    return told_at_the_end(atheris.Fuzz)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
