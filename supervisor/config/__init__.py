"""The configuration: a module for each section, and those that read and check it.

Public: `child`, `crosschecks`, `daemon_checks`, `directories`, `document`, `fds`,
`fleet`, `loader`, `metrics`, `places`, `policy`, `profile_trials`, `read`, `sandbox`,
`walls`.
"""
