"""The C library's allocator, set up for training on a CPU."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_MMAP_THRESHOLD = 32 << 20
"""glibc takes no larger one."""


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory in the process instead of handing it back to the system. True where it took the settings.

    A training step frees and asks for the same activations again; each return to the system costs a page fault for every 4 KiB of the next step
    (about 4 % of a step of a small model). The peak stays what it is. Settings that the user made by environment (MALLOC_...) are left
    alone; other C libraries have no `mallopt` and are too.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    settings = ((M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 << 20))
    taken = [mallopt(option, value) == 1 for option, value in settings]
    return all(taken)
