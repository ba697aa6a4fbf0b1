"""The file system of children: names, grants, open files; no processes, no HTTP.

Nothing is imported here, so that a child loads only the modules that it uses. Public are
the host's side (`vfs.filesystem`, `vfs.names`, `vfs.policy`, `vfs.payload`, `vfs.ledger`,
`vfs.growth`, `vfs.backends`, `vfs.mounts`, `vfs.handover`, `vfs.errors`), a child's side
(`vfs.client`, standard library only, its Trio twin `vfs.client.aio`, and for shells
`vfs.client.shell.fs`, `vfs.client.shell.fd`, `vfs.client.shell.llm`), and the proxy between
the two (`vfs.relay`).
"""
