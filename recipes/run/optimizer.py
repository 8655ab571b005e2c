"""The optimizer that a config describes, as one optax transformation."""

from typing import Any

import jax
import optax

from unitscale.core import is_scaled
from unitscale.optim import ScaledTransformation, independent_weight_decay, muon_axes, scaled, umup

from ..config import OptimizerConfig, RunConfig

# Hidden kernels then do best at about the learning rate that is best for Adam, which moves the
# other roles. Plain models have about 0.02 of the weights' own spectral norm.
_MUON_RMS = 2.0**-5


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step: linear warm-up from 0, then the schedule down to `final_fraction`.

    Example:
      >>> schedule = make_schedule(OptimizerConfig(learning_rate=1.0, schedule="linear"), 100)
      >>> float(schedule(0)), round(float(schedule(100)), 3)
      (1.0, 0.1)
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    last = peak * config.final_fraction
    falling = {
        "cosine": optax.cosine_decay_schedule(peak, steps - warmup, config.final_fraction),
        "linear": optax.linear_schedule(peak, last, steps - warmup),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]
    if not warmup:
        return falling
    rising = optax.linear_schedule(0.0, peak, warmup)
    return optax.join_schedules([rising, falling], [warmup])


def updates_done(opt_state: optax.OptState) -> jax.Array:
    """Updates so far, as the schedule counts them: a step that was left out is none."""
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_schedule)
    return next(node.count for node in nodes if _is_schedule(node))


def _is_schedule(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def make_optimizer(
    config: RunConfig, params: Any
) -> optax.GradientTransformation | ScaledTransformation:
    """The update rule with clipping, schedule and weight decay, in the formats of the config.

    Args:
      config: The whole config; the schedule ends at `train.steps`.
      params: The model's `nnx.Param` state, which tells which parameters decay (those with two or
        more axes, that of a stack of layers not counted: not norms and biases).

    Returns:
      An optax transformation for gradients of the same tree. Where the config names formats of
      weights or moments, it is one of `unitscale.optim.scaled`, for `scale_params(params)`.
    """
    settings, precision = config.optimizer, config.precision
    schedule = make_schedule(settings, config.train.steps)
    decays = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim - _is_stacked(path) >= 2, params, is_leaf=is_scaled
    )
    decay = 0.0 if settings.umup else settings.weight_decay
    b1, b2, eps = settings.b1, settings.b2, settings.adam_eps
    if settings.name == "sgd":
        rule = optax.sgd(schedule, momentum=b1 or None)
    elif settings.name == "lion":
        rule = optax.lion(schedule, b1=b1, b2=b2, weight_decay=decay, mask=decays)
    elif settings.name == "muon":
        rule = optax.contrib.muon(
            schedule,
            beta=b1,
            adam_b1=b1,
            adam_b2=b2,
            eps=eps,
            consistent_rms=_MUON_RMS,
            muon_weight_dimension_numbers=muon_axes(params),
        )
    elif settings.name == "adam" or settings.umup:
        rule = optax.adam(schedule, b1=b1, b2=b2, eps=eps)
    else:
        rule = optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=decay, mask=decays)
    if settings.umup:
        rule = umup(
            rule,
            params,
            optimizer=settings.name if settings.name in ("sgd", "muon") else "adam",
            multipliers={**settings.multipliers},
        )
    chain: list[optax.GradientTransformation] = [rule]
    if settings.clip_norm is not None:
        chain.insert(0, optax.clip_by_global_norm(settings.clip_norm))
    if settings.umup and settings.weight_decay:
        # After the learning rates: the share of a weight that a step removes depends on neither
        # them nor the schedule.
        chain.append(independent_weight_decay(settings.weight_decay, decays))
    if not precision.scaled_state:
        return optax.chain(*chain)
    first, second = precision.moments or (None, None)
    return scaled(
        optax.chain(*chain),
        weights=precision.weights,
        moments=(first, second),
        rounding=precision.rounding,
        key=config.seed,
        min_size=precision.min_size,
    )


def _is_stacked(path: Any) -> bool:
    """Return True if the first axis of the parameter at a path counts layers."""
    keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return "layers" in keys[:-1] and not keys[keys.index("layers") + 1].isdecimal()
