"""Which versions of Ray and Python a node may have, and what of Ray is started."""

import subprocess
import sys

import pytest

pytest.importorskip("ray")

from supervisor.cluster.ray_adapter import AdapterError, Versions


# spec FL1
@pytest.mark.parametrize("python", ["3.11.7", "3.11.2"])
def test_the_patch_level_of_python_may_differ(python: str) -> None:
    Versions("2.60.0", "3.11.7").check(Versions("2.60.0", python), "10.0.0.1:6379")


# spec FL1
@pytest.mark.parametrize(
    ("ray", "python"), [("2.60.1", "3.11.7"), ("2.60.0", "3.12.7"), ("2.60.0", "4.11")]
)
def test_another_version_is_refused_by_both_names(ray: str, python: str) -> None:
    with pytest.raises(AdapterError) as why:
        Versions("2.60.0", "3.11.7").check(Versions(ray, python), "10.0.0.1:6379")
    assert f"it runs Ray {ray} on Python {python}" in str(why.value)
    assert "has Ray 2.60.0 on Python 3.11.7" in str(why.value)


WITH_GRPC = """
import sys, types
sys.modules["grpc"] = types.ModuleType("grpc")
from supervisor.cluster.ray_adapter import run_ray
from ray.scripts import scripts
assert scripts.get_ray_client_dependency_error() is None
assert run_ray(["--version"]) == 0
assert scripts.get_ray_client_dependency_error() is not None
"""


# spec FL9: it listens beside the ports that are told, and runs what it is sent.
@pytest.mark.slow
def test_the_client_server_is_not_started_where_grpc_is_installed() -> None:
    words = [sys.executable, "-c", WITH_GRPC]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
