"""Several processes that train one run, by `jax.distributed`.

Every process runs the same program on its share of each batch; the first alone prints and writes.
What one of them finds wrong before the first step, all report. A process that fails later ends at
once, and the others then find that it is gone.
"""

import contextlib
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

import unitscale
from unitscale.parallel import initialize

from ..errors import RecipeError, complain, told_by


class SharedError(RecipeError):
    """An error that every process of a run raises."""


class Processes(NamedTuple):
    """Which processes train a run; what is None comes from the environment.

    `address` is host and port of the first, `count` their number, `index` which one this is.
    `detect` asks the scheduler that started them (Slurm, Open MPI and others that JAX knows).
    """

    address: str | None = None
    count: int | None = None
    index: int | None = None
    detect: bool = False
    heartbeat: int = 100  # seconds after which a process that is silent counts as lost


@contextlib.contextmanager
def joined(processes: Processes) -> Iterator[None]:
    """Joins the processes of a run, if there are several, for the length of the block.

    Where the block fails, the process reports why and ends there and then. A usual exit would wait
    for the others, which may be waiting for this one.

    Raises:
      RecipeError: Processes that make no sense.
    """
    # The training loop answers SIGTERM itself; see `recipes.run.signals`.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        several = initialize(
            processes.address,
            processes.count,
            processes.index,
            detect=processes.detect,
            heartbeat=processes.heartbeat,
        )
    except ValueError as error:
        raise RecipeError(f"processes: {error}") from error
    if not several:
        yield
        return
    try:
        _check_devices()
        yield
        multihost_utils.sync_global_devices("all processes are done")
    except SharedError:
        raise
    except BaseException as error:
        code = 1
        if told := told_by(error):
            complain(str(told))
            code = told.exit_code
        elif is_lost(error):
            complain(lost_message(error))
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def is_first() -> bool:
    """Whether this process prints and writes for all."""
    return jax.process_index() == 0


def is_lost(error: BaseException) -> bool:
    """Whether an error of several processes came from one that no longer answers."""
    if jax.process_count() == 1 or not isinstance(error, jax.errors.JaxRuntimeError | ValueError):
        return False
    # Reading an array whose exchange failed raises a plain ValueError.
    return any(word in str(error) for word in ("Gloo", "NCCL", "UNAVAILABLE", "barrier"))


def lost_message(error: BaseException, safe: str = "") -> str:
    """What to tell of an error that `is_lost`."""
    reason = str(error).strip().splitlines()[0][:200]
    return (
        f"{_who(jax.process_index())}: another process no longer answers ({reason}); its own log "
        f"says why, if it could{f'; {safe}' if safe else ''}; run the same command again in every "
        "process to resume"
    )


def all_texts(text: str) -> list[str]:
    """The texts that the processes give, in their order; every process has to ask."""
    if jax.process_count() == 1:
        return [text]
    raw = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(raw.size))
    padded = np.zeros(max(int(sizes.max()), 1), np.uint8)
    padded[: raw.size] = raw
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def largest(number: int) -> int:
    """The largest of the numbers that the processes give; every process has to ask."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.int32(number)).max())


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Makes what a block refuses in one process an error of all of them.

    Raises:
      SharedError: That of the block, or of the first process whose block raised one.
    """
    if jax.process_count() == 1:
        yield
        return
    own: RecipeError | None = None
    try:
        yield
    except Exception as error:
        own = told_by(error)
        if own is None:
            raise
    texts = all_texts("" if own is None else str(own))
    if own is not None:
        raise SharedError(str(own), exit_code=own.exit_code) from own
    for index, text in enumerate(texts):
        if text:
            raise SharedError(f"{_who(index)}: {text}")


def check_alike(facts: Mapping[str, Any]) -> None:
    """Compares what the processes of a run have to agree on; every process has to ask.
    Raises:
      SharedError: Some differ; the message is the same in every process.
    """
    own = {"unitscale": unitscale.__version__, "jax": jax.__version__, **facts}
    texts = all_texts(json.dumps({key: repr(value) for key, value in own.items()}))
    first, *others = map(json.loads, texts)
    for index, other in enumerate(others, 1):
        keys = [key for key in first | other if first.get(key) != other.get(key)]
        if keys:
            listed = "\n".join(f"  {k}: {first.get(k)} and {other.get(k)}" for k in keys)
            raise SharedError(
                "processes: expected the same config, data and versions in all; got in processes "
                f"0 and {index}\n{listed}\nstart every process with the same command and files"
            )


def _check_devices() -> None:
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} in process {index}" for index, count in counts.items())
        raise SharedError(
            f"processes: expected as many devices in each; got {listed}; start each with the same "
            "number, such as by CUDA_VISIBLE_DEVICES"
        )


def _who(index: int) -> str:
    return f"process {index} of {jax.process_count()}"
