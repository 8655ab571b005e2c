"""Compare gradients with finite differences, to show that unit scaling keeps their direction.

A unit-scaled model may multiply the gradient of each parameter by a positive constant, but must not
change it otherwise. `check` compares a gradient with central differences of the forward function:
along the gradient, which gives the constant, and along random directions, which must agree with it.
Tolerances are error bounds of the differences.
"""

import zlib
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Loss = Callable[[Any], jax.Array]

# A loss sums many rounded terms: how many of its epsilons its last digits are worth.
_ROUNDINGS = 128
# Differences whose error bound is above this share of the derivative could not tell a wrong one.
_COARSE = 1e-3


def jit(f: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit` without optimizations, for programs that run once."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


class WrongGradient(AssertionError):
    """A gradient that is not a positive constant times the true one."""


def check(
    loss: Loss,
    params: Any,
    *,
    directions: int = 3,
    zero: Collection[str] = (),
    gradient: Any = None,
) -> dict[str, float]:
    """Check the gradient of every leaf; return the constants (gradient over true gradient).

    Args:
        loss: scalar function of a tree of floating arrays of one dtype, deterministic.
        params: the tree.
        directions: number of random directions in addition to the gradient's own.
        zero: endings of the names of leaves whose true gradient is zero.
        gradient: the gradient to check; by default `jax.grad(loss)(params)`.

    Raises:
        WrongGradient: naming the leaf.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(params)
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        for path, _ in paths
    ]
    leaves = [np.asarray(leaf) for _, leaf in paths]

    @jit
    def evaluate(*xs):
        value, grads = jax.value_and_grad(loss)(jax.tree.unflatten(treedef, xs))
        return value, jax.tree.leaves(grads)

    found = evaluate(*leaves)[1] if gradient is None else jax.tree.leaves(gradient)
    grads = [np.asarray(g, np.float64) for g in found]
    assert len(grads) == len(leaves), "the gradient has another structure than the parameters"
    largest = max(map(np.linalg.norm, grads))

    constants = {}
    for i, (name, leaf, grad) in enumerate(zip(names, leaves, grads, strict=True)):

        def moved(offset, i=i, leaf=leaf):
            moved = (leaf + offset).astype(leaf.dtype)
            return float(evaluate(*leaves[:i], moved, *leaves[i + 1 :])[0])

        rng = np.random.default_rng(zlib.crc32(name.encode()))
        random = [u / np.linalg.norm(u) for u in rng.normal(size=(directions, *leaf.shape))]
        norm = np.linalg.norm(grad)
        if name.endswith(tuple(zero)):
            _check_zero(name, leaf.dtype, moved, random, norm / largest)
            continue
        if not (np.isfinite(norm) and norm > 0):
            raise WrongGradient(f"{name}: the gradient is zero or not finite, norm {norm}")
        true, error = _difference(moved, grad / norm, leaf.dtype)
        if true <= error:
            raise WrongGradient(
                f"{name}: along its gradient the loss rises by {true} (error {error}): no positive "
                "constant"
            )
        assert error < _COARSE * true, f"{name}: differences too coarse: {true} with error {error}"
        for u in random:
            ours = np.vdot(grad, u) / norm * true
            found, bound = _difference(moved, u, leaf.dtype)
            bound += abs(np.vdot(grad, u)) / norm * error + _rounding(leaf.dtype) * true
            if abs(found - ours) > bound:
                raise WrongGradient(
                    f"{name}: along a random direction the loss rises by {found}, but {ours} by "
                    f"its gradient (error {bound}, constant {norm / true})"
                )
        constants[name] = float(norm / true)
    return constants


def _rounding(dtype: Any) -> float:
    return _ROUNDINGS * float(jnp.finfo(dtype).eps)


def _difference(moved: Callable, direction: np.ndarray, dtype: Any) -> tuple[float, float]:
    """Estimate the derivative along a unit vector from four points, with an error bound.

    The bound: estimates with two step sizes differ by more than the error of their extrapolation.
    """
    # Truncation falls with the step squared and rounding rises with its inverse.
    step = float(jnp.finfo(dtype).eps) ** 0.25
    values = {k: moved(k * step * direction) for k in (-2, -1, 1, 2)}
    near = (values[1] - values[-1]) / (2 * step)
    far = (values[2] - values[-2]) / (4 * step)
    rounding = _rounding(dtype) * max(map(abs, values.values())) / step
    return (4 * near - far) / 3, abs(near - far) / 3 + rounding


def _check_zero(name, dtype, moved, directions, relative_norm) -> None:
    if relative_norm > 100 * _rounding(dtype):
        raise WrongGradient(f"{name}: expected no gradient; got {relative_norm} of the largest")
    for u in directions:
        found, bound = _difference(moved, u, dtype)
        if abs(found) > bound:
            raise WrongGradient(f"{name}: the loss depends on it ({found}, error {bound})")
