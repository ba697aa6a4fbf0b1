"""What a name or a number of a child stands for: grants, paths, open files.

Nothing is imported here, so that a child pays for what it uses. The doors are
`vfs.filesystem` (the host's side, one facade), `vfs.client` (a child's side, standard
library only; `vfs.aio` is its Trio twin, `vfs.fscmd` and `vfs.fdcmd` those for
shells), `vfs.content` (LLM fds), `vfs.relay` (a
proxy between the two), `vfs.errors` and `vfs.hostio`. Everything else is private to this
package. Knows no processes and no HTTP. Read on in `docs/design.md`.
"""
