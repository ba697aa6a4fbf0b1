"""Children and their life: one child, a kept child, all children of a daemon."""
