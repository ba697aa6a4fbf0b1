"""Settings of the C library's allocator: freed memory goes back to the kernel.

By default glibc keeps up to 64 MiB of freed memory in each arena, once large pieces have
come and gone (mallopt(3), "dynamic mmap threshold"): after 60 requests of 16 MiB a host
kept 82 MiB for good.  Answers of READ are shorter than the threshold, so the end of the
heap is kept for them.  Small pieces that stay keep the pages around them from being
returned; those are returned when a flood of requests is over.
"""

import ctypes

from hostlib.threads import in_background

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

MAPPED_BYTES = 2 * 1024 * 1024
"""Pieces from this length on are mappings of their own."""

KEPT_BYTES = 8 * 1024 * 1024
"""Free bytes that are kept at the end of the heap."""


def return_large_pieces() -> None:
    """Make glibc return large pieces at once; other C libraries do so anyway."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def return_free_pages() -> None:
    """Return every free page to the kernel, in a thread: it takes some milliseconds."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        in_background(malloc_trim, 0)
