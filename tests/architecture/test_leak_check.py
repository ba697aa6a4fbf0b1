"""The leak check can fail: each kind of leftover is seen, and nothing else is."""

import os
import subprocess
import sys

from tests.helpers.leaks import Holdings, holdings, left_over


def test_an_open_descriptor_is_left_over() -> None:
    before = holdings()
    number = os.open("/dev/null", os.O_RDONLY)
    after = holdings()
    os.close(number)
    assert left_over(before, after) == (f"descriptor {number} -> /dev/null",)


def test_a_number_that_was_reopened_is_left_over() -> None:
    number = os.open("/dev/null", os.O_RDONLY)
    before = holdings()
    os.close(number)
    reopened = os.open("/dev/zero", os.O_RDONLY)
    after = holdings()
    os.close(reopened)
    assert reopened == number
    assert left_over(before, after) == (f"descriptor {number} -> /dev/zero",)


def test_a_living_child_is_left_over() -> None:
    before = holdings()
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL) as child:
        after = holdings()
        child.kill()
    (line,) = left_over(before, after)
    assert line.startswith(f"child process {child.pid} ")


def test_a_zombie_is_left_over() -> None:
    before = holdings()
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    after = holdings()
    child.wait()
    (line,) = left_over(before, after)
    assert line.startswith(f"child process {child.pid} ")
    assert line.endswith("(Z)")


def test_what_was_closed_and_waited_for_is_not_left_over() -> None:
    before = holdings()
    number = os.open("/dev/null", os.O_RDONLY)
    os.close(number)
    subprocess.run(["true"], check=True)
    assert left_over(before, holdings()) == ()


def test_a_reused_pid_is_another_child() -> None:
    before = Holdings({}, {(77, 1000): "sh (S)"})
    after = Holdings({}, {(77, 2000): "sh (S)"})
    assert left_over(before, after) == ("child process 77 sh (S)",)
