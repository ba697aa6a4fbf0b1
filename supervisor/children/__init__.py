"""Children and their life: one child, a kept child, all children of a daemon.

Public: `child`, `child_state`, `child_workspaces`, `environment`, `lifecycle`, `specs`.
"""
