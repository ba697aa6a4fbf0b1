"""Replaces a host's program in place, while its children go on."""
