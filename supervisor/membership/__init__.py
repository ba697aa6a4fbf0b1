"""A daemon's membership in a fleet: decisions of the sans-IO node, done here.

Public: `base_keeper`, `bases`, `member`.
"""
