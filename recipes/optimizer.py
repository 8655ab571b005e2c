"""The optimizer that a config describes, as one optax transformation."""

from __future__ import annotations

from typing import Any

import jax
import optax

from unitscale.optim import umup

from .config import Config, OptimizerConfig


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


def make_optimizer(config: Config, params: Any) -> optax.GradientTransformation:
    """The update rule with clipping, schedule and weight decay.

    Args:
      config: The whole config; the schedule ends at `train.steps`.
      params: The model's `nnx.Param` state, which tells which parameters decay (those with two or
        more axes: not norms and biases).

    Returns:
      An optax transformation for gradients of the same tree.
    """
    settings = config.optimizer
    schedule = make_schedule(settings, config.train.steps)
    if settings.name == "sgd":
        inner = optax.sgd(schedule, momentum=settings.b1 or None)
    else:
        inner = optax.adamw(
            schedule,
            b1=settings.b1,
            b2=settings.b2,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            mask=jax.tree.map(lambda leaf: leaf.ndim >= 2, params),
        )
    clip = optax.identity()
    if settings.clip_norm is not None:
        clip = optax.clip_by_global_norm(settings.clip_norm)
    if settings.umup:
        inner = umup(inner, params)
    return optax.chain(clip, inner)
