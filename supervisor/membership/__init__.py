"""A daemon's membership in a fleet: decisions of the sans-IO node, done here."""
