"""Compiled training and evaluation steps."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from unitscale import batch_over, map_values, to_array, value_and_grad
from unitscale.nn import AmaxState
from unitscale.optim import ScaledTransformation
from unitscale.parallel import all_reduce, batch_axes, exchange_gradients

from ..config import PrecisionConfig, RunConfig
from ..recipe import loss_inputs, recipe_of
from .processes import divided, over
from .state import TrainState, init_state, is_amax, plain, scaled, scalified


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    config: RunConfig | None = None,
    *,
    mesh: Mesh | None = None,
):
    """Compile a step `(state, batch, index) -> (state, metrics)`, which donates the state.

    The state is returned unchanged if `state.step` is not `index`, or if loss or gradient are not
    finite; in the second case the step is counted if the config or the loss scale skips it.
    """
    precision = PrecisionConfig() if config is None else config.precision
    micro_batches = 1 if config is None else config.data.micro_batches
    tolerated_in_a_row = 0 if config is None else config.optimizer.skip_nonfinite

    def loss_and_rest(params, amax, rest, batch, scale):
        model = nnx.merge(graphdef, params, amax, rest, copy=True)
        loss = model.loss(*loss_inputs(batch), deterministic=False)
        rest = nnx.state(model, nnx.Not((nnx.Param, AmaxState)))  # with advanced PRNG counts
        return loss if scale is None else loss * scale, (loss, rest)

    by_params_and_amax = value_and_grad(
        loss_and_rest, argnums=(0, 1), has_aux=True, gradients_dtype=precision.gradients
    )

    def compute(params, amax, rest, batch, scale):
        (_, aux), (grads, seen) = by_params_and_amax(params, amax, rest, batch, scale)
        if precision.gradients is not None:
            # XLA converts each gradient to float32 again in the kernels that read it.
            grads = map_values(lambda g: g.astype(jnp.float32), grads)
        if scale is not None:
            grads = jax.tree.map(lambda g: g / scale, grads)
        return *aux, grads, seen

    over_fsdp = config is not None and config.mesh is not None and config.mesh.fsdp > 1
    exchanging = None if precision.exchange is None or over_fsdp else mesh
    if micro_batches > 1:
        axes = () if exchanging is None else batch_axes(exchanging)
        compute = _accumulated(compute, micro_batches, axes)
    differentiate = _exchanged(compute, exchanging, precision.exchange)
    constant = precision.loss_scale if isinstance(precision.loss_scale, float) else None

    def train_step(state: TrainState, batch: jax.Array, index: jax.Array):
        amax, rest = nnx.split_state(state.rest, AmaxState, ...)
        follows = state.loss_scale
        scale = constant if follows is None else follows.value
        with exchange_gradients(precision.exchange if over_fsdp else None):
            loss, rest, grads, seen, auto = differentiate(
                state.params, amax, rest, batch, scale, state.auto
            )
        # The gradient of delayed scales is the amax seen in this step (see unitscale.quant).
        amax = jax.tree.map(lambda own, new: own.add(new).advance(), amax, seen, is_leaf=is_amax)
        rest = nnx.merge_state(amax, rest)
        norm = optax.tree.norm(grads)
        params: Any
        with jax.named_scope("optimizer"):
            if isinstance(optimizer, ScaledTransformation):
                params, opt_state = optimizer.step(state.params, state.opt_state, grads)
            else:
                updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
                params = optax.apply_updates(state.params, updates)
        due, finite = state.step == index, jnp.isfinite(loss) & jnp.isfinite(norm)
        skips, tolerated, kept = state.skips, jnp.bool_(True), state
        if follows is not None:
            follows = follows.after(finite)
        if skips is not None:
            tolerated = skips.in_a_row < tolerated_in_a_row
            skips = skips.after(finite)
        if follows is not None or skips is not None:  # count the step, but leave out its update
            skipped = state._replace(step=state.step + 1, skips=skips, loss_scale=follows)
            kept = _select(due & ~finite & tolerated, skipped, state)
        fresh = TrainState(params, rest, opt_state, state.step + 1, auto, skips, follows)
        with jax.named_scope("optimizer"):
            return _select(due & finite, fresh, kept), {"loss": loss, "gradient_norm": norm}

    def run(state: TrainState, batch: jax.Array, index: jax.Array):
        batch = scaled(precision, batch, 1)
        state, values = scalified(precision, train_step)(state, batch, index)
        return state, plain(precision, values)

    return jax.jit(run, donate_argnums=0)


def _accumulated(compute: Any, parts: int, axes: tuple[str, ...]):
    """Wrap `compute` to run on micro-batches one after another, averaging their gradients."""

    def accumulate(params, amax, rest, batch, scale):
        # The loss of a part counts 1 / parts, so that cotangents are those of the whole batch.
        share = (1.0 if scale is None else scale) / parts
        # Part i takes rows i, i + parts, ..., so that rows stay on their devices.
        batches = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

        def one(rest, batch):
            with batch_over((*axes, parts)):
                loss, rest, grads, seen = compute(params, amax, rest, batch, share)
            return rest, (loss, grads, seen)

        def add(carry, batch):
            rest, values = one(carry[0], batch)
            return (rest, jax.tree.map(jnp.add, carry[1], values)), None

        _, shapes = jax.eval_shape(one, rest, jax.tree.map(lambda x: x[0], batches))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (rest, (loss, grads, seen)), _ = lax.scan(add, (rest, zeros), batches)
        # Amax statistics are summed, not averaged: see `unitscale.quant.QuantState`.
        return loss / parts, rest, jax.tree.map(lambda g: g / parts, grads), seen

    return accumulate


# Vectorized, because stacked layers have one key each.
_fold_in = jnp.vectorize(jax.random.fold_in, excluded={1})


def _exchanged(compute: Any, mesh: Mesh | None, dtype: str | None):
    """Wrap `compute` to run on each device's share of the batch; average gradients in `dtype`."""
    if mesh is None:
        return lambda *args: (*compute(*args[:-1]), args[-1])
    axes, whole = batch_axes(mesh), PartitionSpec()
    parts = math.prod(mesh.shape[axis] for axis in axes)

    def local(params, amax, rest, batch, scale, auto):
        # Dropout differs between devices, so keys are folded with the device's index.
        keys, counts = nnx.split_state(rest, nnx.RngKey, ...)
        device = lax.axis_index(axes)
        own = jax.tree.map(lambda key: _fold_in(key, device), keys)
        rest = nnx.merge_state(own, counts)
        # A device's loss counts 1 / parts, so that cotangents are those of the whole batch.
        share = (1.0 if scale is None else scale) / parts
        with batch_over(axes):
            loss, rest, grads, seen = compute(params, amax, rest, batch, share)
        _, counts = nnx.split_state(rest, nnx.RngKey, ...)
        if auto is None:
            grads = all_reduce(grads, axes, dtype)
        else:
            grads, auto = auto.all_reduce(grads, axes, dtype)
        rest, seen = nnx.merge_state(keys, counts), lax.psum(seen, axes)
        return lax.pmean(loss, axes), rest, grads, seen, auto

    # check_vma would sum the gradients of replicated parameters over devices.
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(whole, whole, whole, PartitionSpec(axes), whole, whole),
        out_specs=whole,
        check_vma=False,
    )


def _select(condition: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(functools.partial(jnp.where, condition), new, old)


def advance(
    step: Callable[..., Any], state: TrainState, batches: Iterator[Any], start: int, stop: int
) -> TrainState:
    """Take the steps `start` to `stop` - 1, and ignore their metrics."""
    for index in range(start, stop):
        state, _ = step(state, next(batches), np.int32(index))
    return state


def abstract_step(config: RunConfig) -> tuple[nnx.GraphDef, Any, tuple[Any, ...]]:
    """Return the model's graphdef, its step, and shapes of the step's arguments, without arrays."""
    made: list[Any] = []

    def begin() -> TrainState:
        graphdef, optimizer, state = init_state(config)
        made.extend((graphdef, optimizer))
        return state

    state, batch = jax.eval_shape(begin), recipe_of(config).abstract_batch(config)
    graphdef, optimizer = made
    step = make_train_step(graphdef, optimizer, config)
    return graphdef, step, (state, batch, jax.ShapeDtypeStruct((), jnp.int32))


def make_loss(graphdef: nnx.GraphDef, *, deterministic: bool = True) -> Callable[..., jax.Array]:
    """Make a model's loss a function `(params, rest, batch) -> float32 scalar`."""

    def loss(params: Any, rest: Any, batch: Any) -> jax.Array:
        model: Any = nnx.merge(graphdef, params, rest, copy=True)
        return model.loss(*loss_inputs(batch), deterministic=deterministic)

    return loss


def over_amax(loss: Callable[..., Any], rest: Any) -> tuple[Any, Callable[..., Any]]:
    """Return delayed scales, and the loss as a function of `(params, scales, *args)`."""
    amax, others = nnx.split_state(rest, AmaxState, ...)
    return amax, lambda params, amax, *args: loss(params, nnx.merge_state(amax, others), *args)


def make_evaluation(
    graphdef: nnx.GraphDef, precision: PrecisionConfig | None = None, *, mesh: Mesh | None = None
) -> Callable[..., jax.Array]:
    """Compile the loss without dropout: `(params, rest, batch) -> float32 scalar`."""
    loss, precision = make_loss(graphdef), precision or PrecisionConfig()

    @jax.jit
    def evaluate(params, rest, batch):
        batch = scaled(precision, divided(batch, mesh), 1)
        with over(mesh):
            return plain(precision, scalified(precision, loss)(params, rest, batch))

    return evaluate


def mean_loss(evaluate: Callable[..., jax.Array], params, rest, batches: Iterable) -> float:
    """Average the loss, in nats, over batches of equal size, waiting for the device once."""
    losses = [evaluate(params, rest, batch) for batch in batches]
    return float(jnp.mean(jnp.stack(losses)))


def predict(
    model: nnx.Module, batches: Iterable[tuple[Any, ...]], precision: PrecisionConfig | None = None
) -> np.ndarray:
    """Run a model without dropout on all batches, and concatenate its outputs in float32."""
    graphdef, state = nnx.split(model)
    precision = precision or PrecisionConfig()
    state = scaled(precision, state)

    def outputs(state, inputs):
        return nnx.merge(graphdef, state)(*inputs, deterministic=True)

    @jax.jit
    def run(state, inputs):
        found = scalified(precision, outputs)(state, scaled(precision, inputs, 1))
        return to_array(found).astype(jnp.float32)

    return np.concatenate(jax.device_get([run(state, batch) for batch in batches]))
