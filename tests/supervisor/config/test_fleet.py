"""`[fleet]`: what it can say, and the text for what it cannot."""

from pathlib import Path

import pytest

from supervisor.config.fleet import FleetQuotaSection, FleetSection
from supervisor.config.loader import ConfigError, load_config, warnings


def load(tmp_path: Path, text: str) -> FleetSection | None:
    """Return the section of a configuration."""
    path = tmp_path / "sandhost.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(str(path)).fleet


def faults(tmp_path: Path, text: str) -> dict[str, str]:
    """Return what is wrong with a configuration, by key."""
    with pytest.raises(ConfigError) as told:
        load(tmp_path, text)
    return {fault.key: fault.reason for fault in told.value.faults}


# spec FL11
def test_without_the_section_there_is_no_fleet(tmp_path: Path) -> None:
    assert load(tmp_path, "") is None


# spec FL5
def test_the_section_alone_has_the_usual_lease_and_fences(tmp_path: Path) -> None:
    section = load(tmp_path, "[fleet]\n")
    assert section == FleetSection(lease="5s", unfenced=False)


# spec FL4, FL7
def test_all_its_keys_are_read(tmp_path: Path) -> None:
    text = """
        [fleet]
        address = "10.0.0.1:6379"
        node = "gpu-1"
        labels = ["gpu", "big.disk"]
        store = "/var/lib/sandhost/fleet"
        lease = "20s"
        unfenced = true
        base_size = "100M"
        bases_kept = 2
        [fleet.quota]
        max_tokens = 1e6
        window = "never"
    """
    assert load(tmp_path, text) == FleetSection(
        address="10.0.0.1:6379",
        node="gpu-1",
        labels=["gpu", "big.disk"],
        store="/var/lib/sandhost/fleet",
        lease="20s",
        unfenced=True,
        base_size="100M",
        bases_kept=2,
        quota=FleetQuotaSection(max_tokens=1e6, window="never"),
    )


# spec FL5
@pytest.mark.parametrize(
    ("line", "key", "reason"),
    [
        ('lease = "2s"', "lease", "from 3s"),
        ('lease = "2h"', "lease", "to an hour"),
        ('lease = "soon"', "lease", "not a time"),
        ('address = "10.0.0.1"', "address", "IP:PORT"),
        ('address = "10.0.0.1:99999"', "address", "IP:PORT"),
        ('base_size = "much"', "base_size", "not a size"),
        ("bases_kept = -1", "bases_kept", "at least 0"),
        ('node = "two words"', "node", "letters"),
        ('labels = ["a,b"]', "labels", "letters"),
        ('store = "fleet"', "store", "absolute path"),
        ("quota.max_tokens = 0", "quota.max_tokens", "more than 0"),
        ('quota.window = "run"', "quota.window", "day or never"),
    ],
)
def test_a_value_that_cannot_be_is_told_with_its_key(
    tmp_path: Path, line: str, key: str, reason: str
) -> None:
    assert reason in faults(tmp_path, f"[fleet]\n{line}\n")[f"fleet.{key}"]


# spec FL2
def test_a_store_in_postgresql_names_the_file_of_its_password(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    file = tmp_path / "pgpass"
    text = f"[fleet]\nstore = 'postgresql://u@db/fleet?passfile={file}'\n"
    assert "No such file" in faults(tmp_path, text)["fleet.store"]
    file.write_text("*:*:*:u:sesame-open\n")
    file.chmod(0o644)
    assert "other users may read" in faults(tmp_path, text)["fleet.store"]
    file.chmod(0o600)
    path = tmp_path / "sandhost.toml"
    path.write_text(text)
    config = load_config(str(path))
    assert list(config.key_files()) == [("fleet.store", str(file))]
    # Children that may write where it lies could make another one of it.
    path.write_text(f"{text}[workspace.w]\nbase = '{tmp_path}'\n")
    told = dict(warnings(load_config(str(path))))
    assert str(tmp_path) in told["fleet.store"]


# spec FL2
@pytest.mark.parametrize(
    "store",
    [
        "postgresql://u:sesame@db/fleet",
        "postgresql://db/fleet?password=sesame",
        "mysql://u:sesame@db/fleet",
        "host=db password=sesame",
    ],
)
def test_a_store_that_is_refused_is_not_shown(tmp_path: Path, store: str) -> None:
    path = tmp_path / "sandhost.toml"
    path.write_text(f"[fleet]\nstore = '{store}'\n")
    with pytest.raises(ConfigError) as told:
        load_config(str(path))
    assert "sesame" not in str(told.value)
    assert [fault.key for fault in told.value.faults] == ["fleet.store"]


# spec FL11
def test_a_key_that_is_not_known_is_refused(tmp_path: Path) -> None:
    assert "fleet.nodes" in faults(tmp_path, "[fleet]\nnodes = 3\n")
