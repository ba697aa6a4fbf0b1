"""What walls a child in: which layers, what this machine gives, how a start asks for it."""
