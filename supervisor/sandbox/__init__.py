"""The walls of a child: which layers, which this machine gives, how a start asks.

Public: `attempts`, `exposed_paths`, `forecast`, `fork_watch`, `groups`, `held_mount`,
`home`, `host_directories`, `link_checks`, `ownership`, `plan`, `probes`, `refusals`,
`scratch`, `shown_files`, `start`.
"""
