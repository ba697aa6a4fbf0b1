"""What a name or a number of a child stands for: grants, paths, open files.

Nothing is imported here, so that a child pays for what it uses. The doors are
`vfs.filesystem` and `vfs.names` (the host's side), with `vfs.policy`, `vfs.payload`,
`vfs.ledger` and `vfs.growth` for what it is given, `vfs.backends` and `vfs.mounts` for where
files lie, and `vfs.handover` for the next program; `vfs.client` (a child's side, standard
library only; `vfs.client.aio` is its Trio twin, `vfs.client.shell.fs`,
`vfs.client.shell.fd` and `vfs.client.shell.llm` those for shells); `vfs.relay` (a proxy
between the two); `vfs.errors`. Everything else is private to this package. Knows no
processes and no HTTP. Read on in `docs/explanation/design.md`.
"""
