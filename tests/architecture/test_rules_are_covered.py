"""Every rule that the documents number is stated there, and named by a test."""

import re

import pytest

from tests.architecture import rules
from tests.architecture.tree import ROOT


def missing_from_tests(wanted: tuple[str, ...]) -> list[str]:
    """Return the rules that no test names, in the order of the documents."""
    return [name for name in wanted if name not in rules.named_by_tests()]


def test_every_rule_of_the_protocol_has_a_test() -> None:
    missing = missing_from_tests(rules.SPEC)
    assert not missing, f"no test says '# spec X' for: {' '.join(missing)}"


def test_every_rule_of_toolexec_has_a_test() -> None:
    missing = missing_from_tests(rules.TOOLEXEC)
    assert not missing, f"no test says '# spec X' for: {' '.join(missing)}"


def test_every_rule_of_workspaces_has_a_test() -> None:
    wanted = tuple(
        name for name in rules.WORKSPACES if name not in rules.WORKSPACES_TO_BUILD
    )
    missing = missing_from_tests(wanted)
    assert not missing, f"no test says '# spec WS1' (for instance) for: {missing}"


def test_every_rule_of_the_models_doors_has_a_test() -> None:
    missing = missing_from_tests(rules.MODEL_DOORS)
    assert not missing, f"no test says '# spec MD1' (for instance) for: {missing}"


def test_every_rule_of_the_network_that_is_kept_has_a_test() -> None:
    wanted = tuple(name for name in rules.NETWORK if name not in rules.NETWORK_TO_BUILD)
    missing = missing_from_tests(wanted)
    assert not missing, f"no test says '# spec NET1' (for instance) for: {missing}"


def test_every_rule_of_the_fleet_that_is_kept_has_a_test() -> None:
    wanted = tuple(name for name in rules.FLEET if name not in rules.FLEET_TO_BUILD)
    missing = missing_from_tests(wanted)
    assert not missing, f"no test says '# spec FL1' (for instance) for: {missing}"


def test_a_rule_that_has_a_test_is_none_to_build() -> None:
    to_build = {*rules.WORKSPACES_TO_BUILD, *rules.NETWORK_TO_BUILD}
    to_build |= {*rules.FLEET_TO_BUILD}
    built = to_build & rules.named_by_tests().keys()
    assert not built, f"take out of what is to be built, for tests name them: {built}"


def test_every_rule_of_workspaces_is_tested_as_a_user_of_no_rights() -> None:
    wanted = {*rules.WORKSPACES} - {*rules.WORKSPACES_TO_BUILD}
    assert wanted - rules.named_for_users() == {*rules.WORKSPACES_OF_ROOT}


def test_every_rule_of_the_network_is_tested_as_root_and_as_a_user() -> None:
    wanted = {*rules.NETWORK} - {*rules.NETWORK_TO_BUILD}
    assert all(map(rules.is_named_for_root, wanted))
    assert wanted - rules.named_for_users() == {*rules.NETWORK_OF_ROOT}


def test_every_attack_in_force_has_a_test() -> None:
    missing = missing_from_tests(rules.ATTACKS_IN_FORCE)
    assert not missing, f"no test says '# attack N' for: {' '.join(missing)}"


def test_every_invariant_in_force_has_a_test() -> None:
    missing = missing_from_tests(rules.INVARIANTS_IN_FORCE)
    assert not missing, f"no test says '# I4' (for instance) for: {' '.join(missing)}"


def test_no_test_names_a_rule_that_does_not_exist() -> None:
    known = {*rules.SPEC, *rules.TOOLEXEC, *rules.INVARIANTS, *rules.ATTACKS}
    known |= {*rules.WORKSPACES, *rules.MODEL_DOORS, *rules.NETWORK}
    known |= {*rules.FLEET}
    unknown = {
        name: files
        for name, files in rules.named_by_tests().items()
        if name not in known
    }
    assert not unknown


@pytest.mark.parametrize(
    ("document", "pattern", "wanted"),
    [
        ("docs/reference/protocol.md", r"\b([A-Z]\d+b?)\b", rules.SPEC),
        ("docs/reference/toolexec.md", r"\((E\d+)\)", rules.TOOLEXEC),
        ("docs/explanation/invariants.md", r"^## (I\d+)\b", rules.INVARIANTS),
        ("docs/explanation/security.md", r"^\| (\d+) \|", rules.ATTACKS),
    ],
)
def test_the_document_states_every_rule(
    document: str, pattern: str, wanted: tuple[str, ...]
) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    stated = set(re.findall(pattern, text, re.MULTILINE))
    assert not [name for name in wanted if name not in stated]


@pytest.mark.parametrize(
    ("comment", "named"),
    [
        ("# spec W2", {"W2"}),
        ("# spec F1, F2 and A3b: why", {"F1", "F2", "A3b"}),
        ("# spec W2, attack 14", {"W2", "14"}),
        ("# attacks 3, 4 and 5; I4", {"3", "4", "5", "I4"}),
        ("# the spec of W2", set()),
        ("# spec WS3a, HM8, A5 and WS12: why", {"WS3a", "HM8", "A5", "WS12"}),
        ("# spec WS3d", set()),
        ("# attacked 4 times, 3 left", set()),
        ("# spec A30x", set()),
    ],
)
def test_a_comment_names_what_it_says(comment: str, named: set[str]) -> None:
    assert rules.names_in(comment) == named
