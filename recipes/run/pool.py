"""Work in several processes, each on its share of the cores."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

from ..startup import start_process

Result = TypeVar("Result")
ATTEMPTS = 2  # at a task whose process died, possibly because of another task


def each(
    tasks: Sequence[Any], jobs: int, work: Callable[..., Result]
) -> Iterator[tuple[Any, Result | str]]:
    """Yield each task when it is over, with what the work returned, or why its process died."""
    if jobs == 1:
        yield from ((task, work(*task)) for task in tasks)
        return
    attempts = dict.fromkeys(range(len(tasks)), 0)
    while attempts:
        context = get_context("spawn")
        cores = context.Queue()
        own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        for job in range(jobs):
            cores.put(set(own[job::jobs]) or set(own))
        with ProcessPoolExecutor(jobs, context, _begin, (cores,)) as pool:
            futures = {pool.submit(_do, work, tasks[index]): index for index in attempts}
            broken = False
            try:
                for future in as_completed(futures):
                    index = futures[future]
                    try:
                        result = future.result()
                    except BrokenProcessPool:
                        broken = True
                        continue
                    del attempts[index]
                    yield tasks[index], result
            except BaseException:
                pool.shutdown(cancel_futures=True)  # no further task begins
                raise
        if not broken:
            return
        # Which process died is not known: each task that could have been running counts an attempt.
        for index in list(attempts)[:jobs]:
            attempts[index] += 1
            if attempts[index] >= ATTEMPTS:
                del attempts[index]
                yield tasks[index], "its process was killed; is there enough memory?"


def _begin(cores: Any) -> None:
    """Pin a process to its cores, before JAX counts them and starts threads."""
    start_process()
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    share = cores.get()
    if share:
        os.sched_setaffinity(0, share)


def _stop_with_parent() -> None:
    """Stop this process when its parent is gone, and the command that resumes may run beside it."""
    if parent := parent_process():
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _do(work: Callable[..., Result], task: Sequence[Any]) -> Result:
    """Do a task; if the parent has gone meanwhile, end the process."""
    try:
        return work(*task)
    finally:
        parent = parent_process()
        if parent and not parent.is_alive():  # asking for the next task would wait forever
            sys.stdout.flush()
            os._exit(1)


def message_of(error: Exception) -> str:
    """The first line of an error that must not stop other tasks.

    Example:
      >>> message_of(ValueError("too few\\nand so on"))
      'ValueError: too few'
    """
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
