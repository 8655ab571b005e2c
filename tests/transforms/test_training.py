"""Whole train steps, iterated: losses follow those of plain float32, and scales stay near sizes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from unitscale import ScaledArray, as_scaled, to_array
from unitscale.core import is_scaled
from unitscale.transforms import scalify

from .models import Task, mlp, step_of, transformer

STEPS = 50
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 4 * STEPS)),
    "momentum": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.sgd(0.02, momentum=0.9, nesterov=True)
    ),
}
TASKS = {"mlp": mlp, "transformer": transformer}


def losses_of(step: Any, params: Any, state: Any, batch: Any) -> tuple[np.ndarray, Any]:
    losses = []
    for _ in range(STEPS):
        params, state, loss = step(params, state, batch)
        losses.append(float(to_array(loss)))
    return np.asarray(losses), (params, state)


def noise_of(step: Any, problem: Task, state: Any, plain: np.ndarray, epsilon: float) -> np.ndarray:
    """How far the losses of the plain program move when its parameters are rounded once.

    The largest of three draws of the rounding, and no smaller than at an earlier step.
    """
    moved = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        params = jax.tree.map(
            lambda x, rng=rng: x * (1 + epsilon * rng.uniform(-0.5, 0.5, x.shape)).astype(x.dtype),
            problem.params,
        )
        moved.append(np.abs(losses_of(step, params, state, problem.batch)[0] - plain))
    return np.maximum.accumulate(np.max(moved, axis=0))


def check_scales(tree: Any) -> None:
    """Every scale is a power of two within two powers of two of the RMS of its value.

    One is what a measured scale allows; the other, what one step after it does.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled):
        if isinstance(leaf, ScaledArray) and np.any(leaf.data):
            name = jax.tree_util.keystr(path)
            scale = float(leaf.scale)
            assert np.frexp(scale)[0] == 0.5, name
            rms = float(np.sqrt(np.mean(np.square(np.asarray(leaf.data, np.float64)))))
            assert 0.25 <= rms <= 4.0, f"{name}: data has RMS {rms}, scale {scale}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("task", ["mlp", pytest.param("transformer", marks=pytest.mark.slow)])
def test_losses_follow_float32_and_scales_have_a_fixed_point(task: str, optimizer: str) -> None:
    problem: Task = TASKS[task]()
    rule = OPTIMIZERS[optimizer]()
    step, state = jax.jit(step_of(problem, rule)), rule.init(problem.params)
    plain, _ = losses_of(step, problem.params, state, problem.batch)
    assert plain[-1] < 0.7 * plain[0], "the task is one that is learned"
    for dtype in (jnp.float32, jnp.float16):
        epsilon = float(jnp.finfo(dtype).eps)
        # A step rounds some hundred times in a row, independently: the root of that, times one.
        bound = 10 * (noise_of(step, problem, state, plain, epsilon) + epsilon * plain)
        scaled = as_scaled((problem.params, state, problem.batch), dtype=dtype)
        losses, end = losses_of(jax.jit(scalify(step)), *scaled)
        far = np.abs(losses - plain) > bound
        assert not far.any(), (dtype, losses[far] - plain[far], bound[far])
        if dtype == jnp.float16:
            check_scales(end)
        floats = [x for x in jax.tree.leaves(end, is_leaf=is_scaled) if is_scaled(x)]
        assert {x.dtype for x in floats} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("mean", [0.0, 8.0, 32.0])
def test_layer_norm_of_flax(mean: float, dtype: Any) -> None:
    """Which takes the variance from the mean of squares."""
    x = np.random.default_rng(0).normal(mean, 1, size=(16, 512)).astype(np.float32)
    given = as_scaled(jnp.asarray(x), dtype=dtype)
    exact = np.asarray(to_array(given), np.float64)
    graph, params = nnx.split(nnx.LayerNorm(512, rngs=nnx.Rngs(0)))
    state = as_scaled(params, dtype=dtype)
    found = to_array(jax.jit(scalify(lambda p, x: nnx.merge(graph, p)(x)))(state, given))
    expected = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)
    atol = 2 * float(jnp.finfo(dtype).eps) * np.max(np.abs(expected))
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=atol)
