"""Units of long and of evil source: others get on, and a cancelled call ends."""

import threading
import time
import tracemalloc
from typing import Self

import pytest
import trio

from supervisor.llmfd import Process, selection, source_code, units
from tests.helpers.contents import ask, asking, failed, holding, text_of

ERRORS = "def f(: ]]] x = = ) class { }\n  if if else ((( \n"
"""A parser gets nowhere with it: 2 s for a MiB."""


class Beats:
    """A thread that wants the interpreter every millisecond; its longest wait."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._is_over.wait(0.001):
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - last)
            last = now


@pytest.mark.slow
@pytest.mark.parametrize(
    "source", ["def f(a):\n    return [a, a]\n\n" * 30_000, ERRORS * 8_000]
)
def test_others_get_on_while_source_is_parsed(source: str) -> None:
    made = holding(source, source="file:a.py")
    begin = time.perf_counter()
    with Beats() as beats:
        ask(made, "read_fd", fd="fd:1", unit="class", index=1)
    # The parser held the interpreter for four fifths of that.
    assert beats.longest_s < 0.5 * (time.perf_counter() - begin)


@pytest.mark.slow
def test_functions_in_functions_take_linear_time() -> None:
    depth = 20_000
    text = "".join(f"function f{n}(){{" for n in range(depth)) + "}" * depth
    made = holding(text, source="file:a.js")
    begin = time.thread_time()
    answer = ask(made, "read_fd", fd="fd:1", unit="function", index=depth)
    # A third of a second; half a minute when each was looked for from the root.
    assert time.thread_time() - begin < 10
    assert answer.get("units") == str(depth)
    assert answer.get("lines") == "1-1"


def test_wrappers_are_whole_at_any_depth() -> None:
    inner = "    @a\n    @b(lambda: 1)\n    def f():\n        pass\n"
    text = f"@outer\nclass A:\n{inner}    def g(): pass\nx = 1\n"
    made = holding(text, source="file:a.py")
    found = ask(made, "read_fd", fd="fd:1", unit="function", name="f")
    assert text_of(found) == inner
    found = ask(made, "read_fd", fd="fd:1", unit="function", name="g")
    assert text_of(found) == "    def g(): pass\n"
    found = ask(made, "read_fd", fd="fd:1", unit="class", name="A")
    assert text_of(found) == text.removesuffix("x = 1\n")


@pytest.mark.parametrize("unit", ["function", "class"])
async def test_a_cancelled_call_ends_before_its_source_does(unit: str) -> None:
    made = holding((ERRORS * 90_000)[: source_code.MOST_BYTES], source="file:a.py")
    begin = time.process_time()
    with trio.move_on_after(0.2) as scope:
        await asking(made, "read_fd", fd="fd:1", unit=unit)
    # 8 s of computing.
    assert scope.cancelled_caught
    assert time.process_time() - begin < 5
    assert not made.is_at_work
    made.close()


class StoppedError(BaseException):
    """Stands for ``trio.Cancelled``."""


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 2, 50, 2000])
@pytest.mark.parametrize("unit", ["paragraph", "section", "function"])
def test_a_call_can_end_at_any_step(
    unit: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [rounds]

    def stop() -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise StoppedError

    for module in (source_code, units):
        monkeypatch.setattr(module, "stop_if_cancelled", stop)
    text = "# heading\n\ndef f(a):\n    return [a, a]\n\n" * 20_000
    made = holding(text, source="file:a.py")
    with pytest.raises(StoppedError):
        ask(made, "read_fd", fd="fd:1", unit=unit)
    assert left == [0], "and nothing is done after that"
    monkeypatch.undo()
    assert ask(made, "read_fd", fd="fd:1", unit=unit).get("units") == "20000" or (
        unit == "paragraph"
    )


async def test_one_long_source_is_parsed_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_code, "ALONE_BYTES", 1000)
    at_work = [0, 0]
    parse = source_code.parse_source

    def note(*args: object) -> object:
        at_work[0] += 1
        at_work[1] = max(at_work)
        time.sleep(0.02)
        tree = parse(*args)  # type: ignore[arg-type]
        at_work[0] -= 1
        return tree

    monkeypatch.setattr(source_code, "parse_source", note)
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            made = holding("def f(): pass\n" * 500, source="file:a.py")
            nursery.start_soon(_count_functions, made)
    assert at_work == [0, 1]


async def _count_functions(made: Process) -> None:
    answer = await asking(made, "read_fd", fd="fd:1", unit="function", index=500)
    assert answer.get("units") == "500"


def test_source_that_is_too_long_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_code, "MOST_BYTES", 20)
    made = holding("def first(): pass\n" * 2, source="file:a.py")
    assert failed(ask(made, "read_fd", fd="fd:1", unit="function")) == (
        *("invalid_parameter", "fd:1"),
        (
            "Content of 36 bytes is too long to be parsed for a function: at most 20"
            " bytes; search it, or read it by lines"
        ),
    )


def test_of_many_units_of_one_name_the_first_are_told() -> None:
    made = holding("# a\n" + "## b\n" * 250 + "# b\n")
    answer = ask(made, "read_fd", fd="fd:1", unit="section", name="b")
    assert failed(answer)[2] == "251 units of the kind section are called b"
    lines = [f"{n}-{n}" for n in range(2, 2 + selection.MOST_NAMED)]
    assert answer.findtext("details") == "Lines: " + ", ".join(lines)
    first = ask(made, "read_fd", fd="fd:1", unit="section", index=1)
    assert first.get("lines") == "1-251"


def test_a_fence_ends_with_its_own_marks() -> None:
    made = holding("# a\n~~~~\n```\n~~~\n# no\n~~~~~\n# b\n````\n# no\n```\n# no\n")
    answer = ask(made, "read_fd", fd="fd:1", unit="section", name="b")
    assert (answer.get("units"), answer.get("lines")) == ("2", "7-11")


def test_a_name_may_be_cut_but_not_its_section() -> None:
    made = holding("# " + "é" * 5000 + "\ntext\n")
    answer = ask(made, "read_fd", fd="fd:1", unit="section", name="é" * 2048)
    assert answer.get("lines") == "1-2"


@pytest.mark.slow
def test_many_headings_take_no_memory() -> None:
    made = holding("# a\n## b\n" * 5_000)
    tracemalloc.start()
    try:
        answer = ask(made, "read_fd", fd="fd:1", unit="section", index=10_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.get("lines") == "10000-10000"
    assert peak < 256 * 1024  # 2 MiB as a list
