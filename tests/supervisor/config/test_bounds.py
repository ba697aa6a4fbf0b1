"""The default bounds are the contract's, number by number.

Elsewhere tests take them from the code, and would follow wherever they went.
"""

import pytest

from protocol import limits
from supervisor.config.document import Config
from supervisor.host import settings_of
from supervisor.parts import Settings

MIB = 1024 * 1024


# spec F4, F5, F6, O9, R1, W3
def test_the_wire_has_the_bounds_of_the_contract() -> None:
    assert limits.MAX_LINE_BYTES == 65_536
    assert limits.MAX_DIGITS == 18
    assert limits.MAX_ECHO_BYTES == 200
    assert limits.FIRST_FILENO == 1000
    assert limits.MAX_READ_BYTES == 16 * MIB
    assert limits.MAX_WRITE_BYTES == 16 * MIB


# spec F8, W3, S7, attack 18: without a configuration, and with one that says nothing.
@pytest.mark.parametrize("config", [None, Config()])
def test_a_host_has_the_bounds_of_the_contract(config: Config | None) -> None:
    settings = settings_of(config)
    assert settings.max_write_bytes == limits.MAX_WRITE_BYTES
    assert settings.payload_budget_bytes == 64 * MIB
    assert settings.deadline_s == 30
    assert settings.grace_s == 5
    assert settings.max_children == 1000
    assert settings.open_files_per_client == 256
    assert settings.clients_per_child == 64
    assert settings.max_write_bytes == Settings().max_write_bytes
