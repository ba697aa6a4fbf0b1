"""Children that a daemon keeps: by name, restarted, with their logs.

Public: `adhoc_logs`, `fleet_place`, `input_pipe`, `kept_child`, `kept_state`,
`log_marks`, `roster`.
"""
