"""The XML of LLM fds: it parses, and what comes out is what went in."""

from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import fdxml

XML_TEXT = st.text(
    st.characters(
        codec="utf-8",
        exclude_characters="".join(map(chr, [*range(32), 0xFFFE, 0xFFFF])),
    )
    | st.sampled_from("\n\r\t<>&\"']]>")
)


def text_of(document: bytes) -> str:
    """Return the text of an element without the two LFs that are not of it."""
    text = ET.fromstring(document).text or ""
    assert text[0] == text[-1] == "\n"
    return text[1:-1]


@given(XML_TEXT)
def test_a_body_parses_to_the_exact_text(text: str) -> None:
    document = fdxml.text_element("fd_content", (("fd", "fd:1"),), text.encode())
    assert text_of(document) == text


@given(st.text())
def test_an_attribute_parses_whatever_was_put_in(text: str) -> None:
    found = ET.fromstring(fdxml.empty("a", (("b", text),))).get("b")
    assert found is not None
    assert len(found) == len(text)
    for came, went in zip(found, text, strict=True):
        assert came in (went, "\ufffd")


@given(XML_TEXT)
def test_an_attribute_keeps_what_xml_can_say(text: str) -> None:
    assert ET.fromstring(fdxml.empty("a", (("b", text),))).get("b") == text


def test_attributes_stand_in_order_and_in_the_words_of_xml() -> None:
    document = fdxml.empty("a", (("z", True), ("b", False), ("a", 7), ("c", 'x"<')))
    assert document == b'<a z="true" b="false" a="7" c="x&quot;&lt;"/>'


def test_raw_leaves_a_body_as_it_is() -> None:
    assert fdxml.text_element("a", (), b"x < y", raw=True) == b"<a>\nx < y\n</a>"


def test_a_body_without_anything_to_escape_is_not_copied() -> None:
    text = b"plain"
    assert fdxml.body(text) is text


def test_a_result_is_worded_as_in_the_design() -> None:
    attributes = (
        *(("fd", "fd:12345"), ("pages", 5), ("truncated", True)),
        *(("lines", "1-42"), ("total_lines", 210)),
    )
    message = "Output exceeds 8000 characters. Use read_fd to read more pages."
    assert fdxml.result(attributes, message, b"First page") == (
        b'<fd_result fd="fd:12345" pages="5" truncated="true" lines="1-42"'
        b' total_lines="210">\n'
        b"  <message>Output exceeds 8000 characters. Use read_fd to read more pages."
        b"</message>\n"
        b"  <preview>\nFirst page\n</preview>\n"
        b"</fd_result>"
    )


def test_an_export_is_worded_as_in_the_design() -> None:
    attributes = (
        *(("fd", "fd:12345"), ("file_path", "/path/to/output.txt")),
        *(("success", True), ("mode", "write")),
    )
    message = "Content from fd:12345 successfully written to /path/to/output.txt"
    assert fdxml.export_result(attributes, message, 25600, 320).decode() == (
        '<fd_write fd="fd:12345" file_path="/path/to/output.txt" success="true"'
        ' mode="write">\n'
        "  <message>Content from fd:12345 successfully written to"
        " /path/to/output.txt</message>\n"
        "  <stats>\n    <bytes>25600</bytes>\n    <lines>320</lines>\n  </stats>\n"
        "</fd_write>"
    )


@pytest.mark.parametrize(
    ("details", "more"),
    [("", ""), ("Operation: write", "  <details>Operation: write</details>\n")],
)
def test_an_error_is_worded_as_in_the_design(details: str, more: str) -> None:
    message = "Cannot write to file: Permission denied"
    document = fdxml.failure("file_operation", "fd:12345", message, details)
    assert document.decode() == (
        '<fd_error type="file_operation" fd="fd:12345">\n'
        f"  <message>{message}</message>\n{more}</fd_error>"
    )


def test_a_list_has_a_row_a_line_and_is_one_tag_if_it_is_empty() -> None:
    rows = [fdxml.empty("fd", (("fd", "fd:1"),))]
    assert fdxml.listing("fd_list", (("count", 1),), rows) == (
        b'<fd_list count="1">\n  <fd fd="fd:1"/>\n</fd_list>'
    )
    assert fdxml.listing("fd_list", (("count", 0),), ()) == b'<fd_list count="0"/>'


def test_a_message_says_what_xml_cannot_in_another_way() -> None:
    assert fdxml.words("a\x00b\ud800<") == "a\ufffdb\ufffd&lt;".encode()


def test_a_summary_stands_behind_the_message() -> None:
    document = fdxml.result((("fd", "fd:1"),), "long", b"</message>\n")
    element = ET.fromstring(fdxml.add_summary(document, "short <&>"))
    assert [child.tag for child in element] == ["message", "summary", "preview"]
    assert element.findtext("summary") == "short <&>"
    assert element.findtext("preview") == "\n</message>\n\n"


@given(st.text(alphabet="a&<>\r\n", max_size=40), st.integers(1, 9))
def test_a_text_is_escaped_in_pieces_as_in_one(text: str, size: int) -> None:
    # One replacement in 60 MB of `&` kept every other thread waiting for 4 s.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fdxml, "PIECE_BYTES", size)
        in_pieces = fdxml.text_element("x", (), text.encode())
    assert in_pieces == fdxml.text_element("x", (), text.encode())
    assert ET.fromstring(in_pieces).text == f"\n{text}\n"
