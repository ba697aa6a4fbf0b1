"""The address of a PostgreSQL: what it may say, and that no text shows a secret."""

import pytest

from supervisor.fleet.store_address import (
    fault_of,
    is_postgres,
    name_of,
    password_file,
)


# spec FL2
def test_a_directory_of_the_head_is_no_address() -> None:
    assert not any(map(is_postgres, (None, "/var/lib/fleet", "mysql://h/b")))
    assert password_file(None) is password_file("/var/lib/fleet") is None


# spec FL2
@pytest.mark.parametrize(
    ("address", "name", "file"),
    [
        ("postgresql://u@db.example/fleet", "database 'fleet' at db.example", None),
        ("postgres://db:5433/a%20b", "database 'a b' at db:5433", None),
        (
            "postgresql://u@h1:1,h2:2/b?sslmode=require",
            "database 'b' at h1:1,h2:2",
            None,
        ),
        ("postgresql://u@[::1]:5432/b", "database 'b' at [::1]:5432", None),
        ("postgresql://%2Frun%2Fpg/b", "database 'b' at /run/pg", None),
        ("postgresql:///b?host=/run/pg", "database 'b' at /run/pg", None),
        ("postgresql://", "the usual database at the usual server", None),
        ("postgresql:///?service=prod", "service 'prod'", None),
        ("postgresql://u@h/b?passfile=/etc/a+b%20c", "database 'b' at h", "/etc/a+b c"),
    ],
)
def test_an_address_names_a_database_and_a_file(
    address: str, name: str, file: str | None
) -> None:
    assert is_postgres(address)
    assert fault_of(address) is None
    assert (name_of(address), password_file(address)) == (name, file)


# spec FL2
@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("postgresql://u:sesame@h/b", "it has a password"),
        ("postgresql://u:@h/b", "it has a password"),
        ("postgresql://u@h/b?password=sesame", "it has a password"),
        ("postgresql://u@h/b?%70assword=sesame", "it has a password"),
        ("postgresql://u@h/b?sslpassword=sesame", "it has a password"),
        ("postgresql://u:ses/ame@h/b", "write a host"),
        ("postgresql://u:ses#ame@h/b", "'#'"),
        ("postgresql://u:ses ame@h/b", "no spaces"),
        ("postgresql://[sesame/b", "write postgresql://"),
        ("postgresql://h:sesame/b", "write a host"),
        ("postgresql://h/b?sesame", "write postgresql://"),
        ("postgresql://h/b?passfile=sesame", "an absolute path"),
    ],
)
def test_an_address_that_cannot_be_used_is_not_shown(address: str, said: str) -> None:
    reason = fault_of(address)
    assert reason is not None
    assert said in reason
    assert "ses" not in reason
