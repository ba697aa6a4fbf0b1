"""The C library's allocator: what is freed goes back to the kernel.

By itself glibc keeps up to 64 MiB of what was freed, in each of its arenas, once large
pieces have come and gone (mallopt(3), "dynamic mmap threshold"): after 60 requests of 16 MiB
a host kept 82 MiB for good. What a READ answers is shorter than the threshold, and what lies
at the end of the heap is kept for it. Of small pieces some stay where they were, and keep what
lies around them: that is given back when all requests of a flood are over.
"""

import ctypes

from hostlib.threads import afterwards

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

MAPPED_BYTES = 2 * 1024 * 1024
"""Pieces from this length on are mappings of their own."""

KEPT_BYTES = 8 * 1024 * 1024
"""What is kept at the end of the heap."""


def return_large_pieces() -> None:
    """Have the allocator return large pieces; other C libraries than glibc do so anyway."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def return_free_pages() -> None:
    """Return every page that is free, in a thread: it takes some milliseconds."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        afterwards(malloc_trim, 0)
