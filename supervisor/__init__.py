"""The supervisor: the host, its children, its commands.

Nothing is imported here, so that `supervisor.__main__` and `supervisor.spawn.launchpad.main`
start without the weight of the host. Uses `vfs` by its public modules and `protocol` by
its root; nothing imports this package. Read on in `docs/explanation/design.md`.
"""
