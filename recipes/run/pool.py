"""Processes that work: their settings, made before JAX starts, and several at once."""

import ctypes
import importlib.util
import logging
import os
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

Result = TypeVar("Result")

# malloc.h: return nothing at the end of the heap, one heap for all threads, no blocks of mmap.
_SETTINGS = {"M_TRIM_THRESHOLD": (-1, -1), "M_ARENA_MAX": (-8, 1), "M_MMAP_MAX": (-4, 0)}


def start_process() -> None:
    keep_freed_memory()
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every file it touches


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next step, on a CPU; return whether it does.

    Else the kernel clears pages anew in every step: a quarter of a small model's. Nothing changes
    if the environment configures malloc.
    """
    told = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    accelerators = any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))
    platforms = os.environ.get("JAX_PLATFORMS") or ("other" if accelerators else "cpu")
    if told or platform.libc_ver()[0] != "glibc" or platforms != "cpu":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return min(mallopt(*setting) for setting in _SETTINGS.values()) == 1


def each(
    tasks: Sequence[Any], jobs: int, work: Callable[..., Result]
) -> Iterator[tuple[Any, Result | str]]:
    """Yield each task when it is over, with what the work returned, or why its process died."""
    if jobs == 1:
        yield from ((task, work(*task)) for task in tasks)
        return
    context = get_context("spawn")
    cores = context.Queue()
    own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    for job in range(jobs):
        cores.put(set(own[job::jobs]) or set(own))
    with ProcessPoolExecutor(jobs, context, _begin, (cores,)) as pool:
        futures = {pool.submit(work, *task): task for task in tasks}
        try:
            for future in as_completed(futures):
                try:
                    result = future.result()
                except BrokenProcessPool:
                    result = "its process was killed, or another's; is there enough memory?"
                yield futures[future], result
        except BaseException:
            pool.shutdown(cancel_futures=True)  # no further task begins
            raise


def _begin(cores: Any) -> None:
    """Pin a process to its cores, before JAX counts them and starts threads."""
    start_process()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    share = cores.get()
    if share:
        os.sched_setaffinity(0, share)


def _end_with_parent() -> None:
    """End this process when its parent is gone: the command that resumes may run beside it."""
    if parent := parent_process():
        parent.join()
        os._exit(1)


def message_of(error: Exception) -> str:
    """The first line of an error that must not stop other tasks."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
