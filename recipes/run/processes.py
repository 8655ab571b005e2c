"""The processes and devices that train a run: `jax.distributed`, meshes and signals.

Every process runs the same program on its share of each batch; only the first prints and writes.
Errors before the first step are reported by all processes. A process that fails later ends at once,
and the others then find that it is gone.
"""

import contextlib
import json
import math
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple, Self, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

import unitscale
from unitscale.parallel import (
    batch_axes,
    batch_share,
    initialize,
    make_mesh,
    param_shardings,
    shard_batch,
)

from ..batches import loss_inputs
from ..config import RunConfig
from ..errors import RecipeError, complain, told_by


class SharedError(RecipeError):
    """An error that every process of a run raises."""


class Processes(NamedTuple):
    """The processes of a run; None is taken from the environment.

    `address` is host and port of the first, `count` their number, `index` which one this is.
    `detect` asks the scheduler that started them (Slurm, Open MPI and others that JAX knows).
    """

    address: str | None = None
    count: int | None = None
    index: int | None = None
    detect: bool = False
    heartbeat: int = 100  # seconds after which a silent process counts as lost


@contextlib.contextmanager
def joined(processes: Processes) -> Iterator[None]:
    """Join the processes of a run, if there are several, for the length of the block.

    If the block fails, the process reports why and ends immediately: a normal exit would wait for
    the others, which may be waiting for this one.
    """
    # The training loop answers SIGTERM itself, see `StopRequest`.
    jax.config.update("jax_enable_preemption_service", False)
    address, count, index, detect, heartbeat = processes
    try:
        several = initialize(address, count, index, detect=detect, heartbeat=heartbeat)
    except ValueError as error:
        raise RecipeError(f"processes: {error}") from error
    if not several:
        yield
        return
    try:
        counts = Counter(device.process_index for device in jax.devices())
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{count} in process {index}" for index, count in counts.items())
            raise SharedError(
                f"processes: expected the same number of devices in each; got {listed}; set it "
                "such as by CUDA_VISIBLE_DEVICES"
            )
        yield
        multihost_utils.sync_global_devices("all processes are done")
    except SharedError:
        raise
    except BaseException as error:
        told = told_by(error)
        if told or is_lost(error):
            complain(str(told or lost_message(error)))
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(told.exit_code if told else 1)


def is_first() -> bool:
    """Tell whether this process prints and writes for all."""
    return jax.process_index() == 0


def is_lost(error: BaseException) -> bool:
    """Tell whether the cause of an error is another process that no longer answers."""
    if jax.process_count() == 1 or not isinstance(error, jax.errors.JaxRuntimeError | ValueError):
        return False
    # Reading an array whose exchange failed raises a plain ValueError.
    return any(word in str(error) for word in ("Gloo", "NCCL", "UNAVAILABLE", "barrier"))


def lost_message(error: BaseException, safe: str = "") -> str:
    """The message of an error that `is_lost`."""
    reason = str(error).strip().splitlines()[0][:200]
    return (
        f"{_who(jax.process_index())}: another process no longer answers ({reason}); its own log "
        f"says why, if it could{f'; {safe}' if safe else ''}; run the same command again in every "
        "process to resume"
    )


def _who(index: int) -> str:
    return f"process {index} of {jax.process_count()}"


def all_texts(text: str) -> list[str]:
    """Gather a text from every process; all have to call it."""
    if jax.process_count() == 1:
        return [text]
    raw = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(raw.size))
    padded = np.zeros(max(int(sizes.max()), 1), np.uint8)
    padded[: raw.size] = raw
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def largest(number: int) -> int:
    """The largest of the processes' numbers; all have to call it."""
    return max(map(int, all_texts(str(number))))


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Turn a user's error in one process into a SharedError of all."""
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
    """Raise a SharedError in every process if the processes' facts or versions differ."""
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


class StopRequest:
    """Within its block, note the first SIGINT or SIGTERM; a second one acts as usual.

    `signal` is None, or the signal that came; shells expect exit code 128 + its number.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others get no signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


def open_mesh(config: RunConfig) -> Mesh | None:
    """The mesh that a config asks for, over all devices; None for one device."""
    if config.mesh is None:
        if jax.process_count() > 1:
            raise RecipeError(
                f"mesh: expected one of the {jax.device_count()} devices of all "
                f"{jax.process_count()} processes; got null; set mesh.data={jax.device_count()}"
            )
        return None
    axes = config.mesh.model_dump()
    precision = config.precision
    if precision.exchange and (math.prod(axes.values()) > axes["data"] or precision.scalify):
        raise RecipeError(
            "precision.exchange: expected mesh.fsdp, context and tensor 1 and precision.scalify "
            f"null, so that parameters are whole on every device; got {precision.exchange} and "
            f"mesh {axes}; set precision.exchange null"
        )
    try:
        return make_mesh(axes)
    except ValueError as error:
        raise RecipeError(f"mesh: {error}") from error


def place(state: Any, mesh: Mesh | None) -> Any:
    """Shard a tree of arrays, equal in all processes, over the mesh."""
    if mesh is None:
        return state
    shardings = param_shardings(state, mesh)
    if jax.process_count() == 1:
        return jax.device_put(state, shardings)
    return jax.jit(_same, out_shardings=shardings)(state)


def whole(tree: Any) -> Any:
    """Gather every array of a tree in this process; all processes have to call it."""

    def own(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        replicated = NamedSharding(cast(NamedSharding, x.sharding).mesh, PartitionSpec())
        return jax.jit(_same, out_shardings=replicated)(x).addressable_data(0)

    return jax.tree.map(own, tree)


def _same(tree: Any) -> Any:
    return tree


def share(mesh: Mesh | None) -> dict[str, int]:
    """This process's share of each batch, as arguments of `Data.training`."""
    process, processes = (0, 1) if mesh is None else batch_share(mesh)
    return {"process": process, "processes": processes}


def place_batch(batch: Any, mesh: Mesh | None) -> Any:
    """Shard a batch over the mesh by its first dimension."""
    return batch if mesh is None else shard_batch(batch, mesh)


def over(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Within the block, layers that are traced know the mesh, as under `jax.set_mesh`."""
    return contextlib.nullcontext() if mesh is None else use_abstract_mesh(mesh.abstract_mesh)


def divided(batch: Any, mesh: Mesh | None) -> Any:
    """Inside a compiled function, the arguments of the loss with their sharding constraints.

    Batches are sharded over `batch_axes`, arrays (batch, time) also over the axis context.
    """
    if mesh is None:
        return batch
    inputs = loss_inputs(batch)
    rows = batch_axes(mesh)
    tokens = PartitionSpec(rows, "context" if "context" in mesh.shape else None)

    def divide(x: Any) -> Any:
        spec = tokens if x.shape == inputs[0].shape and x.ndim == 2 else PartitionSpec(rows)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return tuple(map(divide, inputs))


def on_mesh(step: Callable[..., Any], state: Any, mesh: Mesh | None) -> Callable[..., Any]:
    """Compile the step `(state, batch, ...) -> (state, values)` for a mesh; its state stays put."""
    if mesh is None:
        return step

    def on_divided(state: Any, batch: Any, *rest: Any) -> Any:
        with over(mesh):
            return step(state, divided(batch, mesh), *rest)

    shardings = (param_shardings(state, mesh), None)
    return jax.jit(on_divided, donate_argnums=0, out_shardings=shardings)
