"""The handed-over state as bytes: written ones are read, others refused."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostlib.handover import HandoverError, bytes_as_text, text_as_bytes
from supervisor.children.child_state import restore_spec, snapshot_spec
from supervisor.handover import state as handover_state
from supervisor.handover.state import (
    HostState,
    decode,
    encode,
)
from supervisor.sandbox.plan import PROFILES
from supervisor.spec import ChildSpec
from vfs.clients import CounterState
from vfs.handover import NumberedObjects, Numbering
from vfs.mounts import mount_of
from vfs.places import close_places, open_place
from vfs.policy import Policy


def state(**changes: object) -> HostState:
    """A host without children."""
    known = HostState(1, 2, 3, 4, 5, 6, CounterState(7, 8), [], [], [], [])
    return msgspec.structs.replace(known, **changes)


def test_a_state_is_read_as_it_was_written() -> None:
    known = state(more={"lock": 9}, fds=[3, 4])
    assert decode(encode(known)) == known


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(state())
    monkeypatch.setattr(handover_state, "VERSION", 99)
    with pytest.raises(
        HandoverError, match=r"version \d+\.\d+; this program takes 99\."
    ):
        decode(data)


@given(st.binary(max_size=200))
def test_what_is_no_state_is_refused(data: bytes) -> None:
    with pytest.raises(HandoverError, match="cannot take the host over"):
        decode(data)


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(HandoverError, match="cannot hand the host over"):
        encode(state(more={"door": object()}))


@given(st.binary(max_size=20))
def test_text_that_stands_for_bytes_travels(name: bytes) -> None:
    text = name.decode("utf-8", "surrogateescape")
    plain = {"name": [text, {"more": text}]}
    data = msgspec.msgpack.encode(text_as_bytes(plain))
    assert bytes_as_text(msgspec.msgpack.decode(data)) == plain


def test_a_description_of_a_child_is_read_as_it_was_written() -> None:
    spec = ChildSpec(
        ("/bin/\udcff", "a b"),
        "/",
        "/root",
        env={"A": "\udc80"},
        top_level=True,
        read=("/a",),
        rlimits=((1, 2, 3),),
        timeout_s=1.5,
        sandbox=PROFILES["auto"],
        name="one",
    )
    data = msgspec.msgpack.encode(snapshot_spec(spec))
    assert restore_spec(msgspec.msgpack.decode(data)) == spec


# spec S5: what may wait for another machine is no business of the Trio thread, whatever
# program this process runs by now.
def test_a_place_that_may_wait_is_one_for_the_next_program_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = mount_of(tmp_path.stat().st_dev)
    for is_distant in (False, True):
        monkeypatch.setattr(mount, "is_distant", is_distant)
        place = open_place(str(tmp_path), read=True, relative=b"")
        try:
            numbers = Numbering()
            number = numbers.number_policy(Policy((place,)))
            # Its descriptor is the one that the place before had.
            numbered = NumberedObjects.restore(numbers.places, numbers.policies)
            assert numbered.policies[number].is_distant is is_distant
        finally:
            close_places((place,))
