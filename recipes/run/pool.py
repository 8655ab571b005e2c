"""Settings of a process that must precede JAX, and a pool of worker processes."""

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

# Constants of malloc.h: never return memory at the heap's end, one arena, no mmap blocks.
_SETTINGS = {"M_TRIM_THRESHOLD": (-1, -1), "M_ARENA_MAX": (-8, 1), "M_MMAP_MAX": (-4, 0)}


def start_process() -> None:
    """Silence Orbax. On a CPU, make glibc keep freed memory, unless variables configure malloc."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every file it touches
    # Otherwise the kernel clears pages in every step, a quarter of a small model's time.
    told = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    accelerators = any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))
    platforms = os.environ.get("JAX_PLATFORMS") or ("other" if accelerators else "cpu")
    if told or platform.libc_ver()[0] != "glibc" or platforms != "cpu":
        return
    for setting in _SETTINGS.values():
        ctypes.CDLL(None).mallopt(*setting)


def each(
    tasks: Sequence[Any], jobs: int, work: Callable[..., Result]
) -> Iterator[tuple[Any, Result | str]]:
    """Run `work(*task)` in `jobs` processes; yield each task with its result or failure message."""
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
                    result = "a worker process was killed; is there enough memory?"
                yield futures[future], result
        except BaseException:
            pool.shutdown(cancel_futures=True)  # start no further tasks
            raise


def _begin(cores: Any) -> None:
    """Pin a process to its cores, before JAX counts them and starts threads."""

    def end_with_parent() -> None:  # a resumed command may train the same runs
        if parent := parent_process():
            parent.join()
            os._exit(1)

    start_process()
    threading.Thread(target=end_with_parent, daemon=True).start()
    if share := cores.get():
        os.sched_setaffinity(0, share)


def message_of(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
