"""A data-parallel training step that exchanges gradients in FP8."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.sharding import Mesh, PartitionSpec

from ..core import CastRounding, batch_over, is_scaled, storage_of, to_array, value_and_grad, widen
from ._auto_scale import AutoScale
from ._collectives import AxisName, all_reduce


class ParallelState(NamedTuple):
    """The state of `train_step`: parameters, optimizer state, and `AutoScale` or None."""

    params: Any
    opt_state: Any
    auto: AutoScale | None = None


export.register_namedtuple_serialization(
    ParallelState, serialized_name="unitscale.parallel.ParallelState"
)


def train_step(
    loss: Callable[[Any, Any], jax.Array],
    optimizer: Any,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
    dtype: Any = jnp.float8_e4m3fn,
    rounding: CastRounding = "nearest",
    small: int = 1024,
    donate: bool = True,
) -> Callable[..., tuple[ParallelState, jax.Array]]:
    """Build a compiled data-parallel step.

    Scaling:
        Each of n devices differentiates 1/n of the mean loss over its shard of the batch. Gradients
        are averaged by `all_reduce` in ``dtype`` and multiplied by n, and every device takes the
        same optimizer step. With float32, the step equals that of one device with the whole batch.

    Args:
        loss: function of parameters and a batch: the mean over the batch, without collectives.
        optimizer: an optax transformation, or one from `unitscale.optim.scaled`.
        mesh: a mesh from `make_mesh`; devices along its other axes repeat the same work.
        axis_name: axis, or axes, over which the batch is sharded.
        dtype: format of the exchange, as in `all_reduce`.
        rounding: rounding of the exchange; with "stochastic" each step needs a key.
        small: leaves with fewer entries are exchanged in float32.
        donate: reuse the memory of the state that is passed in.

    Returns:
        ``step(state, batch, key=None) -> (state, loss)``. It takes a `ParallelState` and a batch
        whose leaves have the batch as their first dimension. The loss is a float32 mean over
        devices. An AutoScale in the state scales the exchange, and is updated.

    Raises:
        TypeError: if ``optimizer`` is not an optax transformation; in the step, if parameters are
            ScaledArrays and it is not from `unitscale.optim.scaled`.
        ValueError: if the mesh lacks the axis, or ``dtype`` cannot be exchanged; in the step, if
            the batch is not divisible by the number of devices.

    Example:
        >>> import optax
        >>> from unitscale.parallel import make_mesh
        >>> mesh, tx = make_mesh({"data": 1}, devices=jax.devices()[:1]), optax.sgd(0.25)
        >>> step = train_step(lambda w, x: jnp.mean((w - x) ** 2), tx, mesh)
        >>> state, loss = step(ParallelState(jnp.float32(0), tx.init(0.0)), jnp.ones(4))
        >>> print(state.params, loss)
        0.5 1.0

    References:
        Peng et al., "FP8-LM", 2023, arXiv 2310.18313, section 2.1.
    """
    where, scaled_step = "unitscale.parallel.train_step", getattr(optimizer, "step", None)
    if not callable(getattr(optimizer, "update", None)):
        raise TypeError(
            f"{where}: optimizer must be an optax transformation; got {type(optimizer).__name__}"
        )
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if not names or set(names) - set(mesh.shape):
        raise ValueError(
            f"{where}: axis_name must name axes of the mesh; got {axis_name!r} for the axes "
            f"{', '.join(mesh.shape)}"
        )
    storage_of("parallel.train_step: dtype", dtype)
    devices = math.prod(mesh.shape[name] for name in names)

    def part(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        value = widen(to_array(loss(params, batch)))
        return value / devices, value

    def local(state: ParallelState, batch: Any, key: jax.Array | None) -> Any:
        with batch_over(names):
            (_, value), grads = value_and_grad(part, has_aux=True)(state.params, batch)
        settings: dict[str, Any] = {"rounding": rounding, "key": key, "small": small}
        auto = state.auto
        if auto is None:
            grads = all_reduce(grads, axis_name, dtype, **settings)
        else:
            grads, auto = auto.all_reduce(grads, axis_name, dtype, **settings)
        grads = jax.tree.map(lambda g: g * devices, grads)
        if scaled_step is not None:
            params, opt_state = scaled_step(state.params, state.opt_state, grads)
        else:
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = jax.tree.map(
                lambda p, u: jnp.asarray(p + u).astype(jnp.result_type(p)), state.params, updates
            )
        return ParallelState(params, opt_state, auto), lax.pmean(value, axis_name)

    def step(state: ParallelState, batch: Any, key: jax.Array | None = None) -> Any:
        for x in jax.tree.leaves(batch):
            rows = jnp.shape(x)[0] if jnp.ndim(x) else 0
            if not rows or rows % devices:
                raise ValueError(
                    f"{where}: the batch must be divisible by the {devices} devices of "
                    f"{axis_name!r}; got a leaf of shape {jnp.shape(x)}"
                )
        found = any(map(is_scaled, jax.tree.leaves(state.params, is_leaf=is_scaled)))
        if found and scaled_step is None:
            raise TypeError(
                f"{where}: optimizer must be of unitscale.optim.scaled for ScaledArray parameters; "
                f"got {type(optimizer).__name__}, which would update data and scale separately"
            )
        whole = PartitionSpec()
        # check_vma=False, so that JAX does not sum gradients of replicated parameters.
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(whole, PartitionSpec(names), whole),
            out_specs=whole,
            check_vma=False,
        )
        return mapped(state, batch, key)

    return jax.jit(step, donate_argnums=0 if donate else ())
