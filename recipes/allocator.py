"""How the C library keeps memory between two steps on a CPU."""

import ctypes
import importlib.util
import os
import platform

# Of malloc.h: nothing returned at the end of the heap, one heap for all threads, no blocks of mmap.
_SETTINGS = {"M_TRIM_THRESHOLD": (-1, -1), "M_ARENA_MAX": (-8, 1), "M_MMAP_MAX": (-4, 0)}


def keep_freed_memory() -> bool:
    """Has glibc keep what is freed, for what is allocated next; returns whether it does.

    XLA's CPU backend frees the arrays of a step and allocates them again in the next one. glibc
    gives large blocks back to the kernel, which clears every page that it hands out anew: 29,000
    page faults in a step of `configs/gpt/parity.yaml`, a quarter of its time. A process then stays
    as large as it once was. It must come before JAX starts its threads.

    Nothing changes where a GPU or TPU computes, where the C library is another one, or where the
    environment says what malloc does (``MALLOC_...``, ``GLIBC_TUNABLES``).
    """
    told = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if told or platform.libc_ver()[0] != "glibc" or not _on_cpu():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return min(mallopt(*setting) for setting in _SETTINGS.values()) == 1


def _on_cpu() -> bool:
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    return not any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))
