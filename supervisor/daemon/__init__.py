"""The daemon: `sandhost serve`, its checks, its sweep, the service manager.

Public: `handover_check`, `serve`.
"""
