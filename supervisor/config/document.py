"""A whole configuration: one field for each section of the file."""

from collections.abc import Iterator
from itertools import chain

import msgspec

from hostlib.user_values import join_key
from supervisor.config.child import ChildSection
from supervisor.config.fds import FileDescriptorSection, ToolsSection
from supervisor.config.fleet import FleetSection
from supervisor.config.host import HostSection, LimitsSection
from supervisor.config.metrics import MetricsSection
from supervisor.config.policy import PolicySection
from supervisor.config.sandbox import SandboxSection
from supervisor.llm.section import LlmSection
from supervisor.network.section import CredentialSection
from supervisor.toolexec.section import ToolexecSection
from supervisor.toolexec.sidecar_section import SidecarSection
from supervisor.workspace.section import WorkspaceSection


class Config(msgspec.Struct, forbid_unknown_fields=True):
    """A whole file."""

    host: HostSection = msgspec.field(default_factory=HostSection)
    limits: LimitsSection = msgspec.field(default_factory=LimitsSection)
    credential: dict[str, CredentialSection] = {}
    policy: dict[str, PolicySection] = {}
    child: dict[str, ChildSection] = {}
    sandbox: dict[str, SandboxSection] = {}
    toolexec: ToolexecSection | None = None
    sidecar: dict[str, SidecarSection] = {}
    tools: ToolsSection = msgspec.field(default_factory=ToolsSection)
    file_descriptor: FileDescriptorSection | None = None
    llm: LlmSection | None = None
    metrics: MetricsSection | None = None
    workspace: dict[str, WorkspaceSection] = {}
    fleet: FleetSection | None = None

    def key_files(self) -> Iterator[tuple[str, str]]:
        """Yield (key, path) of each file of a secret that is named, as it is written."""
        if self.llm is not None:
            for key, path in self.llm.key_files():
                yield f"llm.{key}", path
        for name, credential in self.credential.items():
            yield f"credential.{join_key(name)}.file", credential.file
        if self.fleet is not None:
            for key, path in self.fleet.key_files():
                yield f"fleet.{key}", path

    def places_written(self) -> frozenset[str]:
        """Return every path that children or their tools may write."""
        policies = self.policy.values()
        roots = chain.from_iterable((policy.root, policy.home) for policy in policies)
        workspaces = (sidecar.workspace for sidecar in self.sidecar.values())
        grants = chain.from_iterable(policy.write for policy in policies)
        bases = (section.base for section in self.workspace.values())
        written = (*roots, *workspaces, *grants, *bases)
        return frozenset(path for path in written if path)
