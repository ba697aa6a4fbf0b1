"""One client's conversation: bytes from its descriptors, replies back, in order."""
