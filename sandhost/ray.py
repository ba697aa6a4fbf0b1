"""Sandboxes of this project behind the interface of `ray.experimental.sandbox`.

import ray
import sandhost.ray

sandbox = sandhost.ray.create("/srv/repo", memory="1Gi")
print(ray.get(sandbox.exec.remote("make test")).exit_code)
"""

from supervisor.cluster.ray_sandbox import (
    Sandbox,
    SandhostBackend,
    SandhostRuntime,
    create,
)

__all__ = ["Sandbox", "SandhostBackend", "SandhostRuntime", "create"]
