"""Paragraphs, sections, functions and classes."""

import sys

import pytest

from tests.helpers.contents import ask, failed, holding, text_of

PYTHON = """import os


@decorated
def first(a):
    return a


class Thing:
    def method(self):
        pass

    async def first(self):
        pass
"""

SOURCES = {
    "a.py": (PYTHON, "method", "    def method(self):\n        pass\n", "Thing"),
    "a.js": (
        "export function f() {}\nconst g = () => 1;\nclass A { m() {} }\n",
        "g",
        "const g = () => 1;\n",
        "A",
    ),
    "a.ts": (
        "interface I { a: string }\nfunction f(a: number): string { return '' }\n",
        "f",
        "function f(a: number): string { return '' }\n",
        "I",
    ),
    "a.go": (
        "package a\n\ntype T struct {\n}\n\nfunc (t T) M() {\n}\n",
        "M",
        "func (t T) M() {\n}\n",
        "T",
    ),
    "a.rs": (
        "struct S;\nimpl S {\n    fn f(&self) {}\n}\n",
        "f",
        "    fn f(&self) {}\n",
        "S",
    ),
    "a.c": (
        "struct s { int a; };\nstatic int *f(struct s *x)\n{\n  return 0;\n}\n",
        "f",
        "static int *f(struct s *x)\n{\n  return 0;\n}\n",
        "s",
    ),
    "a.java": (
        "class A {\n  A() {}\n  int f() { return 1; }\n}\n",
        "f",
        "  int f() { return 1; }\n",
        "A",
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_function_is_found_in_every_language(name: str) -> None:
    source, function, body, thing = SOURCES[name]
    made = holding(source, source=f"file:{name}")
    answer = ask(made, "read_fd", fd="fd:1", unit="function", name=function)
    assert text_of(answer) == body
    answer = ask(made, "read_fd", fd="fd:1", unit="class", name=thing)
    if name == "a.rs":
        assert failed(answer)[0] == "ambiguous"  # the struct, and its impl
    else:
        first = text_of(answer).partition("\n")[0]
        assert first == next(
            line for line in source.split("\n") if _defines(line, thing)
        )


def _defines(line: str, thing: str) -> bool:
    words = ("class", "interface", "type", "struct")
    return any(line.startswith(f"{word} {thing}") for word in words)


METHODS = {
    "python": (
        (
            "class A:\n    def g(self):\n        def h(): pass\n\n\n"
            "class B:\n    class A:\n        def g(self): return 2\n"
        ),
        {
            "B.A.g": "        def g(self): return 2\n",
            "A.g.h": "        def h(): pass\n",
        },
    ),
    "javascript": (
        "class A {\n  g() {}\n}\nclass B {\n  g() { return 2 }\n}\n",
        {"A.g": "  g() {}\n", "B.g": "  g() { return 2 }\n"},
    ),
    "typescript": (
        "export class A {\n  g(): void {}\n}\nclass B {\n  g(): number { return 2 }\n}\n",
        {"A.g": "  g(): void {}\n", "B.g": "  g(): number { return 2 }\n"},
    ),
    "go": (
        "package a\n\nfunc (t *A) g() {}\nfunc (B[T]) g() int { return 2 }\n",
        {"A.g": "func (t *A) g() {}\n", "B.g": "func (B[T]) g() int { return 2 }\n"},
    ),
    "rust": (
        "impl<T> A<T> {\n    fn g() {}\n}\nimpl C for B {\n    fn g() { 2; }\n}\n",
        {"A.g": "    fn g() {}\n", "B.g": "    fn g() { 2; }\n"},
    ),
    "java": (
        "class A {\n  void g() {}\n}\nclass B {\n  int g() { return 2; }\n}\n",
        {"A.g": "  void g() {}\n", "B.g": "  int g() { return 2; }\n"},
    ),
}


# Outside checks: the same method of two classes is told apart by its class.
@pytest.mark.parametrize("language", METHODS)
def test_a_method_is_found_by_its_class_and_name(language: str) -> None:
    source, methods = METHODS[language]
    made = holding(source)
    for name, body in methods.items():
        answer = ask(
            made, "read_fd", "fd:1", unit="function", name=name, language=language
        )
        assert text_of(answer) == body
        assert answer.get("name") == name
    answer = ask(made, "read_fd", "fd:1", unit="function", name="g", language=language)
    assert failed(answer)[0] == "ambiguous"
    for name in ("X.g", "A.x", "A.", ".g", "A..g", "X.A.g"):
        answer = ask(
            made, "read_fd", "fd:1", unit="function", name=name, language=language
        )
        assert failed(answer)[0] == "not_found", name


def test_a_name_that_two_classes_end_in_is_ambiguous_and_the_whole_is_not() -> None:
    made = holding(METHODS["python"][0], source="file:a.py")
    answer = ask(made, "read_fd", fd="fd:1", unit="function", name="A.g")
    assert failed(answer)[0] == "ambiguous"
    assert answer.findtext("details") == "Lines: 2-3, 8-8"
    answer = ask(made, "read_fd", fd="fd:1", unit="class", name="B.A")
    assert answer.get("lines") == "7-8"


def test_a_heading_with_a_dot_is_one_name() -> None:
    made = holding("# 1.2 A\n\ntext\n\n# A\n\nmore\n")
    answer = ask(made, "read_fd", fd="fd:1", unit="section", name="1.2 A")
    assert answer.get("lines") == "1-4"


# Outside checks: prose that the guess takes for no code, and a file of another name.
def test_a_language_that_is_said_is_not_guessed() -> None:
    made = holding("x = 1\ndef f(): pass\n", source="file:a.txt")
    made.add_text("class A { int f() { return 1; } }\n", "file:b.py")
    answer = ask(
        made, "read_fd", fd="fd:1", unit="function", name="f", language="python"
    )
    assert text_of(answer) == "def f(): pass\n"
    answer = ask(made, "read_fd", fd="fd:2", unit="class", name="A", language="java")
    assert answer.get("lines") == "1-1"
    assert ask(made, "fd_info", fd="fd:2").get("type") == "python"  # as it was guessed


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (
            {"unit": "function", "language": "cobol"},
            "Parameter language must be one of",
        ),
        ({"unit": "function", "language": 1}, "Parameter language must be a string"),
        ({"unit": "section", "language": "c"}, "language goes with unit function"),
        ({"language": "c"}, "Missing parameter: unit"),
        ({"page": 1, "language": "c"}, "Selectors exclude each other: page, unit"),
    ],
)
def test_a_language_stands_with_a_function_or_class(
    asked: dict[str, object], why: str
) -> None:
    answer = ask(holding("int f() {}\n"), "read_fd", fd="fd:1", **asked)
    assert failed(answer)[0] == "invalid_parameter"
    assert failed(answer)[2].startswith(why)


def test_decorators_belong_to_what_they_decorate() -> None:
    made = holding(PYTHON, source="file:a.py")
    answer = ask(made, "read_fd", fd="fd:1", unit="function", index=1)
    assert text_of(answer) == "@decorated\ndef first(a):\n    return a\n"
    assert (answer.get("unit"), answer.get("index")) == ("function", "1")
    assert answer.get("units") == "3"


def test_several_functions_of_one_name_are_told_with_their_lines() -> None:
    answer = ask(
        holding(PYTHON, source="file:a.py"),
        "read_fd",
        fd="fd:1",
        unit="function",
        name="first",
    )
    assert failed(answer)[0] == "ambiguous"
    assert answer.findtext("details") == "Lines: 4-6, 13-14"


def test_a_language_is_guessed_from_the_text() -> None:
    answer = ask(holding(PYTHON), "read_fd", fd="fd:1", unit="class", name="Thing")
    assert text_of(answer).startswith("class Thing:")


def test_prose_has_no_functions() -> None:
    answer = ask(holding("Once upon a time"), "read_fd", fd="fd:1", unit="function")
    assert failed(answer)[0] == "invalid_parameter"


def test_without_the_grammars_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tree_sitter", None)
    answer = ask(
        holding(PYTHON, source="file:a.py"), "read_fd", fd="fd:1", unit="class"
    )
    assert failed(answer)[::2] == (
        "invalid_parameter",
        "Units of python need its grammar; install sandhost[units]",
    )


def test_source_that_is_nested_deep_is_walked() -> None:
    made = holding("x = " + "(" * 5000 + ")" * 5000, source="file:a.py")
    answer = ask(made, "read_fd", fd="fd:1", unit="function", name="f")
    assert failed(answer)[0] == "not_found"


def test_paragraphs_are_runs_of_lines_that_are_not_blank() -> None:
    text = "\n \none\ntwo\n\n\t\n  three\r\n\r\nfour"
    made = holding(text)
    found = [
        text_of(ask(made, "read_fd", fd="fd:1", unit="paragraph", index=n))
        for n in (1, 2, 3)
    ]
    assert found == ["one\ntwo\n", "  three\r\n", "four"]


def test_a_section_has_its_subsections_and_code_is_no_heading() -> None:
    text = "intro\n# A\na\n## B #\n```\n# not\n```\n# C\nc"
    made = holding(text)
    found = ask(made, "read_fd", fd="fd:1", unit="section", name="A")
    assert text_of(found) == "# A\na\n## B #\n```\n# not\n```\n"
    assert found.get("units") == "3"
    found = ask(made, "read_fd", fd="fd:1", unit="section", name="B")
    assert text_of(found) == "## B #\n```\n# not\n```\n"


def test_without_headings_sections_are_what_is_marked() -> None:
    made = holding("a\nb\nc\n")
    ask(made, "mark_fd_section", fd="fd:1", start_line=2, end_line=2, ref_id="mine")
    found = ask(made, "read_fd", fd="fd:1", unit="section", name="mine")
    assert text_of(found) == "b\n"
