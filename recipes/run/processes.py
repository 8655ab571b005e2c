"""Processes and devices that train a run together; only the first process prints and writes."""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Self, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

import unitscale
from unitscale.parallel import batch_axes, initialize, make_mesh, param_shardings, shard_batch

from ..config import RunConfig
from ..errors import RecipeError, complain, told_by
from ..recipe import loss_inputs


@contextlib.contextmanager
def joined(**options: Any) -> Iterator[None]:
    """Connect the processes of a run; `options` are those of `unitscale.parallel.initialize`."""
    # The training loop handles SIGTERM itself, in `StopRequest`.
    jax.config.update("jax_enable_preemption_service", False)
    several = initialize(**options)
    try:
        yield
        if several:
            multihost_utils.sync_global_devices("all processes are done")
    except BaseException as error:
        if not several:
            raise
        told = told_by(error)
        # A normal exit would wait for the other processes, which may wait for this one.
        traceback.print_exc() if told is None else complain(str(told))
        sys.stdout.flush()
        sys.stderr.flush()
        if is_first():
            time.sleep(2)  # its exit ends the others: give them time to print their errors
        os._exit(1 if told is None else told.exit_code)


def is_first() -> bool:
    return jax.process_index() == 0


def check_alike(facts: Mapping[str, Any]) -> None:
    """Raise an error in every process if facts or versions differ between processes."""
    own = {"unitscale": unitscale.__version__, "jax": jax.__version__, **facts}
    names, values = list(own), [zlib.crc32(repr(own[name]).encode()) for name in own]
    rows = gathered(np.array(values, np.uint32))
    if differ := [names[column] for column in np.flatnonzero((rows != rows[0]).any(0))]:
        what = f"processes: expected the same in each; they differ in {', '.join(differ)}"
        raise RecipeError(f"{what}; start every process with the same command, files and versions")


def gathered(value: Any) -> np.ndarray:
    """Stack the arrays of all processes, which must all call this function."""
    several = jax.process_count() > 1
    return np.asarray(multihost_utils.process_allgather(value)) if several else value[None]


class StopRequest(contextlib.ExitStack):
    """A context that records the first SIGINT or SIGTERM; a second one acts as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.signal: signal.Signals | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only it can handle signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self.callback(signal.signal, number, signal.signal(number, self._note))
        return super().__enter__()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self.close()

    def agreed(self, *, logging: bool) -> signal.Signals | None:
        """Return the signal that should stop the run; processes agree on it at steps that log."""
        if jax.process_count() == 1:
            return self.signal
        number = int(gathered(np.int32(self.signal or 0)).max()) if logging else 0
        return signal.Signals(number) if number else None


def open_mesh(config: RunConfig) -> Mesh | None:
    """Make a config's mesh over all devices; return None for a single device."""
    if config.mesh is None:
        if (count := jax.process_count()) > 1:
            what = f"mesh: expected the {jax.device_count()} devices of {count} processes"
            raise RecipeError(f"{what}; got null; set mesh.data={jax.device_count()}")
        return None
    return make_mesh(config.mesh.model_dump())


def place(state: Any, mesh: Mesh | None) -> Any:
    """Shard a tree of arrays, which is the same in all processes, over the mesh."""
    if mesh is None:
        return state
    shardings = param_shardings(state, mesh)
    if jax.process_count() == 1:
        return jax.device_put(state, shardings)
    return jax.jit(lambda x: x, out_shardings=shardings)(state)


def whole(tree: Any) -> Any:
    """Gather every array of a tree in this process; all processes must call this function."""

    def own(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        replicated = NamedSharding(cast(NamedSharding, x.sharding).mesh, PartitionSpec())
        return jax.jit(lambda x: x, out_shardings=replicated)(x).addressable_data(0)

    return jax.tree.map(own, tree)


def place_batch(batch: Any, mesh: Mesh | None) -> Any:
    """Shard a batch over the mesh by its first dimension."""
    return batch if mesh is None else shard_batch(batch, mesh)


def over(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Make the mesh known to layers that are traced in the block, as `jax.set_mesh` does."""
    return contextlib.nullcontext() if mesh is None else use_abstract_mesh(mesh.abstract_mesh)


def divided(batch: Any, mesh: Mesh | None) -> Any:
    """In a compiled function, return the loss's arguments with sharding constraints."""
    if mesh is None:
        return batch
    inputs, rows = loss_inputs(batch), batch_axes(mesh)
    tokens = PartitionSpec(rows, "context" if "context" in mesh.shape else None)

    def divide(x: Any) -> Any:
        spec = tokens if x.shape == inputs[0].shape and x.ndim == 2 else PartitionSpec(rows)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return tuple(map(divide, inputs))


def on_mesh(step: Callable[..., Any], state: Any, mesh: Mesh | None) -> Callable[..., Any]:
    """Compile `step(state, batch, ...)` for a mesh; the state keeps its sharding."""
    if mesh is None:
        return step

    def on_divided(state: Any, batch: Any, *rest: Any) -> Any:
        with over(mesh):
            return step(state, divided(batch, mesh), *rest)

    shardings = (param_shardings(state, mesh), None)
    return jax.jit(on_divided, donate_argnums=0, out_shardings=shardings)
