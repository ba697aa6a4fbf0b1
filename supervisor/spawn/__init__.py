"""Processes: the launchpad that forks and reaps, the launcher, restarts.

Public: `ends`, `inner_pair`, `launcher`, `launchpad.layers.common_root`,
`launchpad.layers.fresh_root`, `launchpad.layers.loopback`, `launchpad.layers.overlay`,
`launchpad.layers.overlay_trials`, `launchpad.start`, `launchpad.wire`,
`launchpad.words`, `process`, `request`, `restart_policies`, `restarts`.
"""
