"""Reports of a host over HTTP: metrics, health, and a status page.

Public: `fleet_tables`, `listener`, `loop`, `registry`, `tables`.
"""
