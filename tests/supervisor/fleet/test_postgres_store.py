"""A store in a real PostgreSQL: what goes wrong there, and is said in plain words."""

import gc
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from supervisor.fleet.held_slices import LedgerRow
from supervisor.fleet.step import Change, StoreError
from tests.helpers import postgres
from tests.helpers.command import small_disk

psycopg = pytest.importorskip("psycopg")

from supervisor.fleet.postgres_store import PostgresStore, TimeBounds  # noqa: E402

pytestmark = pytest.mark.slow

ROW = LedgerRow("L1", 2, 3)
QUICK = TimeBounds(connect_s=2, lock_s=0.1, statement_s=0.5, answer_s=2)


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    """A server for the tests of this file."""
    with postgres.server() as one:
        yield one


@pytest.fixture
def address(server: postgres.Server) -> str:
    """An empty database."""
    return server.address_of(server.make_base())


def keys(store: PostgresStore) -> list[str]:
    return [key for _, key, _ in store.load()]


# Opening


# spec FL2
def test_a_wrong_password_is_told_and_none_is_shown(
    server: postgres.Server, tmp_path: Path
) -> None:
    wrong = tmp_path / "pgpass"
    wrong.write_text("*:*:*:*:sesame-open\n")
    wrong.chmod(0o600)
    place = f"fleet@127.0.0.1:{server.port}/postgres?passfile={wrong}"
    with pytest.raises(StoreError) as told:
        PostgresStore(f"postgresql://{place}")
    assert str(told.value) == (
        "cannot open the fleet's store, database 'postgres' at"
        f" 127.0.0.1:{server.port}: password authentication failed for user"
        ' "fleet"; see that it runs, and that the password file has its user'
    )
    wrong.chmod(0o644)  # libpq does not read one that others may read
    with pytest.raises(StoreError, match="no password supplied; see"):
        PostgresStore(f"postgresql://{place}")


# spec FL2
def test_the_password_may_stand_where_libpq_looks_for_it(
    server: postgres.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = f"postgresql://fleet@127.0.0.1:{server.port}/{server.make_base()}"
    monkeypatch.setenv("PGPASSFILE", str(server.password_file))
    PostgresStore(bare).close()
    monkeypatch.delenv("PGPASSFILE")
    services = tmp_path / "services"
    services.write_text(
        f"[fleet]\nhost=127.0.0.1\nport={server.port}\nuser=fleet\n"
        f"dbname=postgres\npassfile={server.password_file}\n"
    )
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    PostgresStore("postgresql:///?service=fleet").close()


# spec FL2
def test_what_cannot_be_opened_is_named(server: postgres.Server) -> None:
    for address, said in (
        ("postgresql://127.0.0.1:1/x", "database 'x' at 127.0.0.1:1: Connection refus"),
        ("postgresql://no.such.invalid/x", "database 'x' at no.such.invalid: "),
        (server.address_of("none"), '"none" does not exist; see'),
        (server.address_of("postgres", "other"), "password"),
    ):
        with pytest.raises(StoreError, match=r"^cannot open the fleet's store") as told:
            PostgresStore(address, QUICK)
        assert said in str(told.value)


# spec FL2
def test_a_user_that_may_make_no_tables_is_told(server: postgres.Server) -> None:
    base = server.make_base()
    server.run(f"CREATE ROLE small LOGIN PASSWORD '{server.password}'")
    with server.password_file.open("a") as lines:
        lines.write(f"*:*:*:small:{server.password}\n")
    server.run("REVOKE CREATE ON SCHEMA public FROM public", base)
    small = server.address_of(base, "small")
    with pytest.raises(
        StoreError, match=r"permission denied.*let its user make tables"
    ):
        PostgresStore(small)
    # Where another user has made them, its rights on them are enough.
    PostgresStore(server.address_of(base)).close()
    server.run("GRANT ALL ON ALL TABLES IN SCHEMA public TO small", base)
    store = PostgresStore(small)
    store.put([Change("ledger", "a", ROW)])
    assert (store.epoch, keys(store)) == (2, ["a"])
    store.close()


# spec FL2
def test_a_server_that_may_not_be_written_is_told(server: postgres.Server) -> None:
    base = server.make_base()
    server.run(f"ALTER DATABASE {base} SET default_transaction_read_only = on")
    with pytest.raises(StoreError, match="read-only"):
        PostgresStore(server.address_of(base))


# spec FL2
def test_two_schemas_of_one_database_are_two_stores(server: postgres.Server) -> None:
    base = server.make_base()
    server.run("CREATE SCHEMA one", base)
    first = PostgresStore(server.address_of(base))
    first.put([Change("ledger", "a", ROW)])
    options = "&options=-csearch_path%3Done"
    second = PostgresStore(server.address_of(base) + options, QUICK)
    assert (second.epoch, keys(second)) == (1, [])
    with pytest.raises(
        StoreError, match=r"another directory has it, from 127\.0\.0\.1;"
    ):
        PostgresStore(server.address_of(base) + options, QUICK)
    first.close()
    second.close()


HOLDER = """
import signal, sys
from supervisor.fleet.postgres_store import TimeBounds, PostgresStore
store = PostgresStore(sys.argv[1], TimeBounds(silent_s=float(sys.argv[2])))
print("open", flush=True)
sys.stdin.readline()
store.put([])
"""


# spec FL2: the machine of the other one was lost, or stopped: it says nothing any more.
def test_the_lock_of_a_directory_that_is_silent_comes_free(address: str) -> None:
    words = [sys.executable, "-c", HOLDER, address, "1.5"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        process.send_signal(signal.SIGSTOP)
        store = PostgresStore(address)  # waits for the end of that session
        assert store.epoch == 2
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(b"\n")
        assert b"StoreError: cannot write the fleet's store" in errors
        assert b"idle-session timeout" in errors
        store.close()


# At work


# spec FL2
def test_a_session_that_the_server_ends_writes_no_more(
    server: postgres.Server, address: str
) -> None:
    store = PostgresStore(address)
    query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE"
    server.run(f"{query} application_name = 'sandhost fleet'")
    for changes in ([Change("ledger", "a", ROW)], []):
        with pytest.raises(StoreError, match=r"^cannot write the fleet's store"):
            store.put(changes)
    store.close()
    again = PostgresStore(address)
    assert (again.epoch, keys(again)) == (2, [])
    again.close()


# spec FL2
def test_a_slow_server_and_a_stopped_one_are_given_up(
    server: postgres.Server, address: str
) -> None:
    store = PostgresStore(address, QUICK)
    with psycopg.connect(address) as other:
        other.execute("SELECT FROM sandhost_fleet_epoch FOR UPDATE")
        with pytest.raises(
            StoreError, match="canceling statement due to statement timeout"
        ):
            store.put([Change("ledger", "a", ROW)])
    with pytest.raises(StoreError, match="the connection is closed"):
        store.put([])  # it is over, though its server would go on
    store = PostgresStore(address, QUICK)
    assert keys(store) == []
    server.stop()
    try:
        with pytest.raises(StoreError, match="no answer within 2 s"):
            store.put([])
        with pytest.raises(StoreError, match="connection timeout expired"):
            PostgresStore(address, QUICK)
    finally:
        server.resume()
        store.close()
    gc.collect()  # the connection that was not made is in a cycle with its exception


@pytest.fixture
def lonely(server: postgres.Server, address: str) -> Iterator[str]:
    """A database whose server waits for a standby at each commit; there is none."""
    set_standby(server, "none_such")
    yield address
    set_standby(server, "")


def set_standby(server: postgres.Server, name: str) -> None:
    server.run(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
    server.run("SELECT pg_reload_conf()")
    while server.run("SHOW synchronous_standby_names") != [(name,)]:
        select.select([], [], [], 0.02)


# spec FL2
def test_a_commit_that_no_standby_confirms_is_not_told_as_done(lonely: str) -> None:
    with pytest.raises(StoreError, match="no answer within 2 s"):
        PostgresStore(lonely, QUICK)


CANCEL = (
    "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event='SyncRep'"
)


# spec FL2: the server calls such a commit done, with a warning.
def test_a_commit_whose_standby_is_not_waited_for_is_not_told_as_done(
    server: postgres.Server, address: str, request: pytest.FixtureRequest
) -> None:
    store = PostgresStore(address)
    request.getfixturevalue("lonely")

    def cancel() -> None:
        while server.run(CANCEL) != [(True,)]:
            pass

    with ThreadPoolExecutor() as threads:
        cancelled = threads.submit(cancel)
        with pytest.raises(StoreError, match=r"synchronous replication.*its standbys"):
            store.put([Change("ledger", "a", ROW)])
        cancelled.result()
    store.close()


WARN = (
    (
        "CREATE FUNCTION warn() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE WARNING 'look out'; RETURN NEW; END $$"
    ),
    (
        "CREATE TRIGGER warned BEFORE INSERT ON sandhost_fleet_rows"
        " FOR EACH ROW EXECUTE FUNCTION warn()"
    ),
)


# spec FL2
def test_another_warning_of_the_server_is_no_fault(
    server: postgres.Server, address: str
) -> None:
    store = PostgresStore(address)
    base = address.partition("?")[0].rpartition("/")[2]
    for statement in WARN:
        server.run(statement, base)
    store.put([Change("ledger", "a", ROW)])
    assert keys(store) == ["a"]
    store.close()


WAITED = (
    "SELECT 1 FROM pg_locks WHERE NOT granted AND waitstart < now() - '1.3 s'::interval"
)


# spec FL2
def test_a_user_s_own_short_bound_does_not_cut_the_wait_for_the_lock(
    server: postgres.Server,
) -> None:
    base = server.make_base()
    server.run(f"CREATE ROLE hasty SUPERUSER LOGIN PASSWORD '{server.password}'")
    server.run("ALTER ROLE hasty SET statement_timeout = '1s'")
    with server.password_file.open("a") as lines:
        lines.write(f"*:*:*:hasty:{server.password}\n")
    first = PostgresStore(server.address_of(base))
    with ThreadPoolExecutor() as threads:
        second = threads.submit(PostgresStore, server.address_of(base, "hasty"))
        while server.run(WAITED, base) == []:
            select.select([], [], [], 0.02)
        first.close()
        store = second.result()
    assert store.epoch == 2
    store.close()


# spec FL2
def test_a_disk_that_is_full_is_told_and_loses_nothing(
    server: postgres.Server,
) -> None:
    with small_disk(server.where, "24m") as disk:
        owner = os.stat(server.where / "data")
        os.chown(disk, owner.st_uid, owner.st_gid)
        server.run(f"CREATE TABLESPACE small LOCATION '{disk}'")
        server.run("CREATE DATABASE small TABLESPACE small")
        store = PostgresStore(server.address_of("small"))
        stored: list[str] = []
        with pytest.raises(StoreError, match=r"No space left.*; make room on its disk"):
            fill(store, stored)
        store.close()
        server.run("ALTER DATABASE small SET TABLESPACE pg_default")
        store = PostgresStore(server.address_of("small"))
        assert set(keys(store)) == set(stored) != set()
        store.close()
        server.run("DROP DATABASE small")
        server.run("DROP TABLESPACE small")


def fill(store: PostgresStore, stored: list[str]) -> None:
    """Store large rows of which nothing can be compressed."""
    for number in range(1000):
        large = LedgerRow(secrets.token_hex(200_000))
        store.put([Change("ledger", str(number), large)])
        stored.append(str(number))


WRITER = """
import itertools, sys
from supervisor.fleet.held_slices import LedgerRow
from supervisor.fleet.postgres_store import PostgresStore
from supervisor.fleet.step import Change, StoreError
store = PostgresStore(sys.argv[1])
try:
    for number in itertools.count():
        store.put([Change("ledger", str(number), LedgerRow("L1"))])
        print(number, flush=True)
except StoreError as why:
    print(why, file=sys.stderr, flush=True)
"""


# spec FL2
def test_a_server_killed_while_it_commits_has_lost_nothing_that_was_told() -> None:
    with postgres.server() as own:
        for round_number in range(1, 5):
            words = [sys.executable, "-c", WRITER, own.address]
            pipe = subprocess.PIPE
            with subprocess.Popen(
                words, stdout=pipe, stderr=pipe, text=True
            ) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                for _ in range(7 * round_number):
                    process.stdout.readline()
                own.kill()
                more = process.stdout.read().split()
                said = process.stderr.read()
            assert "cannot write the fleet's store, database 'postgres' at 127" in said
            assert own.password not in said
            own.start()
            store = PostgresStore(own.address)
            told = 7 * round_number + len(more)
            # The one after the last may be stored, too: nobody was told of it.
            assert len(keys(store)) in {told, told + 1}
            assert store.epoch == 2 * round_number
            store.put([Change("ledger", key, None) for key in keys(store)])
            store.close()
