"""Settings of each process, made before JAX starts."""

import ctypes
import importlib.util
import logging
import os
import platform

# malloc.h: return nothing at the end of the heap, one heap for all threads, no blocks of mmap.
_SETTINGS = {"M_TRIM_THRESHOLD": (-1, -1), "M_ARENA_MAX": (-8, 1), "M_MMAP_MAX": (-4, 0)}


def start_process() -> None:
    """Set up memory and logging, before JAX starts its threads."""
    keep_freed_memory()
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every file it touches


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next allocation, on a CPU; return whether it does.

    XLA's CPU backend frees the arrays of a step and allocates them again in the next one. glibc
    returns large blocks to the kernel, which clears every page anew: 29,000 page faults in a step
    of `configs/gpt/parity.yaml`, a quarter of its time. In return, a process never shrinks. Nothing
    changes if the environment configures malloc (``MALLOC_...``, ``GLIBC_TUNABLES``).
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
