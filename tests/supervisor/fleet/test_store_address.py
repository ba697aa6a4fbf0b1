"""The address of a PostgreSQL: what it may say, and that no text shows a secret."""

import pytest

from supervisor.fleet.store_address import (
    fault_of,
    is_postgres,
    name_of,
    secret_files,
    usual_secret_files,
)


# spec FL2
def test_a_directory_of_the_head_is_no_address() -> None:
    assert not any(map(is_postgres, (None, "/var/lib/fleet", "mysql://h/b")))
    for store in (None, "/var/lib/fleet"):
        assert secret_files(store) == usual_secret_files(store, {}) == ()


# spec FL2
@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("postgresql://u@db.example/fleet", "database 'fleet' at db.example"),
        ("postgres://db:5433/a%20b", "database 'a b' at db:5433"),
        ("postgresql://u@h1:1,h2:2/b?sslmode=require", "database 'b' at h1:1,h2:2"),
        ("postgresql://u@[::1]:5432/b", "database 'b' at [::1]:5432"),
        ("postgresql://%2Frun%2Fpg/b", "database 'b' at /run/pg"),
        ("postgresql:///b?host=/run/pg", "database 'b' at /run/pg"),
        ("postgresql://", "the usual database at the usual server"),
        ("postgresql:///?service=prod", "service 'prod'"),
    ],
)
def test_an_address_names_a_database(address: str, name: str) -> None:
    assert is_postgres(address)
    assert fault_of(address) is None
    assert name_of(address) == name


SET = {"HOME": "/h", "PGPASSFILE": "/p", "PGSSLKEY": "/k"}
USUAL = "/h/.pgpass", "/h/.postgresql/postgresql.key"


# spec FL2
@pytest.mark.parametrize(
    ("words", "environment", "named", "usual"),
    [
        ("", {"HOME": "/h"}, (), USUAL),
        ("", SET, (), ("/p", "/k")),
        ("passfile=/etc/a+b%20c", SET, ("/etc/a+b c",), ("/k",)),
        ("sslkey=/s.key", {"HOME": "/h"}, ("/s.key",), USUAL[:1]),
        ("sslkey=pkcs11:1&passfile=/f", SET, ("/f",), ()),
    ],
)
def test_the_files_of_an_address_s_secrets_are_known(
    words: str, environment: dict[str, str], named: tuple[str], usual: tuple[str]
) -> None:
    address = f"postgresql://u@h/b?{words}"
    assert fault_of(address) is None
    assert secret_files(address) == named
    assert usual_secret_files(address, environment) == usual


# spec FL2
@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("postgresql://u:sesame@h/b", "it has a password"),
        ("postgresql://u:@h/b", "it has a password"),
        ("postgresql://u@h/b?password=sesame", "it has a password"),
        ("postgresql://u@h/b?%70assword=sesame", "it has a password"),
        ("postgresql://u@h/b?sslpassword=sesame", "it has a password"),
        ("postgresql://u@h/b?scram_client_key=sesame", "it has a password"),
        ("postgresql://u@h/b?scram_server_key=sesame", "it has a password"),
        ("postgresql://u:ses/ame@h/b", "write a host"),
        ("postgresql://u:ses#ame@h/b", "'#'"),
        ("postgresql://u:ses ame@h/b", "no spaces"),
        ("postgresql://[sesame/b", "write postgresql://"),
        ("postgresql://h:sesame/b", "write a host"),
        ("postgresql://h/b?sesame", "write postgresql://"),
        ("postgresql://h/b?passfile=sesame", "passfile: write an absolute path"),
        ("postgresql://h/b?sslkey=sesame", "sslkey: write an absolute path"),
    ],
)
def test_an_address_that_cannot_be_used_is_not_shown(address: str, said: str) -> None:
    reason = fault_of(address)
    assert reason is not None
    assert said in reason
    assert "ses" not in reason
