"""Backends of sidecars: processes on this machine, or containers."""
