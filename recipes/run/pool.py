"""Work in several processes of their own, each on its share of the cores."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

from ..startup import start_process

Result = TypeVar("Result")
ATTEMPTS = 2  # at a task whose process died, which may have been a neighbour's doing


def each(
    tasks: Sequence[Any], jobs: int, work: Callable[..., Result]
) -> Iterator[tuple[Any, Result | str]]:
    """Yields each task when it is over, with what the work returned, or why its process died."""
    if jobs == 1:
        yield from ((task, work(*task)) for task in tasks)
        return
    attempts = dict.fromkeys(range(len(tasks)), 0)
    while attempts:
        context = get_context("spawn")
        cores = context.Queue()
        for share in _shares(jobs):
            cores.put(share)
        with ProcessPoolExecutor(jobs, context, _begin, (cores,)) as pool:
            futures: dict[Future[Result], int] = {
                pool.submit(_do, work, tasks[index]): index for index in attempts
            }
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
                pool.shutdown(cancel_futures=True)  # nothing is begun any more
                raise
        if not broken:
            return
        # Which process died is not known: those that could have been at work count one attempt.
        for index in list(attempts)[:jobs]:
            attempts[index] += 1
            if attempts[index] >= ATTEMPTS:
                del attempts[index]
                yield tasks[index], "its process was killed; is there enough memory?"


def _shares(jobs: int) -> list[set[int]]:
    """The cores of this process, dealt out to the jobs."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [set(cores[index::jobs]) or set(cores) for index in range(jobs)]


def _begin(cores: Any) -> None:
    """Keeps a process on its own cores, so that its threads do not wait for those of others.

    It comes before JAX's first computation, which counts the cores and starts threads.
    """
    start_process()
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    share = cores.get()
    if share:
        os.sched_setaffinity(0, share)


def _stop_with_parent() -> None:
    """Asks this process to stop when its parent is gone, which could not ask it.

    Otherwise it would train on beside the command that resumes what it trains.
    """
    if parent := parent_process():
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _do(work: Callable[..., Result], task: Sequence[Any]) -> Result:
    """Does a task; where the parent has gone meanwhile, the process ends with it."""
    try:
        return work(*task)
    finally:
        parent = parent_process()
        if parent and not parent.is_alive():  # who asks for the next task would wait for ever
            sys.stdout.flush()
            os._exit(1)


def message_of(error: Exception) -> str:
    """What a task returns of an error that must not stop the others.

    Example:
      >>> message_of(ValueError("too few\\nand so on"))
      'ValueError: too few'
    """
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
