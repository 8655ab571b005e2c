"""The weights that a run takes from an earlier one."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from unitscale import to_array

from ..config import RunConfig
from ..errors import RecipeError
from .folder import run_folder
from .state import load_trained


def take_weights(
    model: nnx.Module,
    run: RunConfig,
    needed: Collection[str] | None = None,
    wanted: Collection[str] = (),
) -> None:
    """Set the parameters of a model in place to those that a run has under the same paths.

    The run must have all parameters of the parts in `needed` (None: of all parts), in the same
    shapes; parts in `wanted` are taken if the run has them.
    """
    # Values are read from the disk even if the caller traces, such as for shapes alone.
    with jax.ensure_compile_time_eval():
        _, state = load_trained(run, lambda message: None)
        # Uncommitted to a device, like new arrays: a step whose inputs are committed in part
        # returns all of them committed, and compiles again for its results.
        found = {path: np.asarray(value) for path, value in _values(state.params).items()}
    own = nnx.state(model, nnx.Param)
    wrong = [
        f"{'.'.join(map(str, path))} {value.shape}, the run has "
        f"{found[path].shape if path in found else 'none'}"
        for path, value in _values(own).items()
        if (needed is None or path[0] in needed)
        and (path not in found or found[path].shape != value.shape)
    ]
    if wrong:
        raise RecipeError(
            f"init: the weights in {run_folder(run)} do not fit: expected {'; '.join(wrong)}; give "
            "the run of a model of this shape"
        )
    for path, variable in nnx.to_flat_state(own):
        if path in found and (needed is None or path[0] in (*needed, *wanted)):
            variable.set_value(jnp.asarray(found[path], variable.get_value().dtype))
    nnx.update(model, own)


def _values(state: Any) -> dict[tuple[Any, ...], jax.Array]:
    return {path: to_array(leaf.get_value()) for path, leaf in nnx.to_flat_state(state)}
