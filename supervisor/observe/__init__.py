"""Reports of a host over HTTP: metrics and a status page.

Public: `fleet_tables`, `listener`, `loop`, `registry`, `tables`.
"""
