"""Messages: whole there and back, and other versions refused by name."""

import hashlib

import msgspec
import pytest

from supervisor.fleet import messages
from supervisor.fleet.messages import ChildReport, Join, Joined, Session, SliceReport

SESSION = Session("L1", 3)


# spec FL2
def test_a_join_is_the_same_on_the_other_side() -> None:
    join = Join(
        "a",
        SESSION,
        1,
        messages.VERSION,
        ("gpu",),
        4,
        (ChildReport("c1", 2, "running", pid=7),),
        (SliceReport("tokens/1", 2.5, is_last=True),),
    )
    assert messages.decode_from_node(messages.encode(join)) == join


# spec FL2
def test_an_answer_is_the_same_on_the_other_side() -> None:
    joined = Joined(2, SESSION, 1, 5.0)
    assert messages.decode_from_directory(messages.encode(joined)) == joined


# spec FL2
def test_a_node_cannot_speak_as_the_directory() -> None:
    with pytest.raises(msgspec.ValidationError):
        messages.decode_from_node(messages.encode(Joined(2, SESSION, 1, 5.0)))


# spec FL11
def test_another_version_is_refused_with_both_named() -> None:
    with pytest.raises(messages.VersionError, match=r"'fleet-0'.*'fleet-5'"):
        messages.check_version("node 'a'", "fleet-0")


FORMS = {
    "fleet-1": "31e6fc98a44e0a93",
    "fleet-2": "38d4dadab4dce4a9",
    "fleet-3": "fec26c1a59c60c19",
    "fleet-4": "27a0756be7c5477e",
    "fleet-5": "27a0756be7c5477e",
}
"""Hash of the forms of all messages, by version; fleet-5 has other requests to actors."""


# spec FL11
def test_messages_of_another_form_have_another_version() -> None:
    kinds = [messages.FromNode, messages.FromDirectory]
    _, parts = msgspec.json.schema_components(kinds)
    for part in parts.values():
        part.pop("description", None)  # its docstring
    form = msgspec.json.encode(parts, order="sorted")
    found = hashlib.sha256(form).hexdigest()[:16]
    assert FORMS[messages.VERSION] == found, (
        "a change: raise VERSION, and enter it here"
    )
