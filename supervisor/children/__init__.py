"""One child and its life, from its description to its end.

Public: `child`, `child_state`, `child_workspaces`, `environment`, `lifecycle`, `specs`.
"""
