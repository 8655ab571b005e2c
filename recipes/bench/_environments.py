"""What the programs of `bench fuzz` may call: on plain arrays, and on ScaledArrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from unitscale import ScaledArray, ops, optim, quant, to_array

OPTIMIZERS = {
    "adam": optax.adam(0.1),
    "sgd": optax.sgd(0.5, momentum=0.9),
    "rmsprop": optax.rmsprop(0.1),
    "lion": optax.lion(0.1),
    "adagrad": optax.adagrad(0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
}


class _PlainOps:
    """`unitscale.ops` on plain arrays, with plain results."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: to_array(getattr(ops, name)(*args, **kwargs))


def _q8(x: Any, dtype: str = "e4m3fn") -> ScaledArray:
    return quant.quantize(x, dtype, quant.Dynamic())


def _rounded(x: Any, dtype: str = "e4m3fn") -> Any:
    """Exact in float64, and known as an operation that rounds; E4M3 has no infinity but NaN."""
    x = lax.reduce_precision(x, 11, 52)
    return jnp.where(jnp.isinf(x), jnp.nan, x) if dtype == "e4m3fn" else x


def _matrix_product(x: Any, y: Any) -> Any:
    (_, _), (_, _) = x.shape, y.shape  # of matrices only
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())))


def _product(x: Any, y: Any) -> Any:
    return quant.scaled_matmul(
        _q8(x), _q8(y), quant.Contraction("ik", "kj", "ij"), 1.0, jnp.float32
    )


def _step(name: str, params: Any, grads: Any) -> Any:
    """Two steps of an optimizer."""
    inner, grads = OPTIMIZERS[name], jnp.broadcast_to(grads, params.shape).astype(params.dtype)
    state = inner.init(params)
    for factor in (1.0, -0.5):
        updates, state = inner.update(grads * factor, state, params)
        params = optax.apply_updates(params, updates)
    return params


def _scaled_step(name: str, params: Any, grads: Any) -> Any:
    """The same by `optim.scaled`, whose moments stay in float32."""
    transformation = optim.scaled(OPTIMIZERS[name], weights=None, moments=(None, None))
    grads = jnp.broadcast_to(to_array(grads), params.shape)
    state = transformation.init(params)
    for factor in (1.0, -0.5):
        updates, state = transformation.update(grads * factor, state, params)
        params = optim.apply_updates(params, updates)
    return params


# Each halves what is far too large.
_MOST_TURNS = 1000


def _newton(x: Any) -> Any:
    """The root of x^2 + 2, by a loop that stops on a tolerance, and two steps more.

    What rounding is tried on may be a negative number, which has no root: so turns are counted.
    """
    square = lax.stop_gradient(x * x) + 2

    def better(root: Any) -> Any:
        return (root + square / root) / 2

    def far(carry: Any) -> Any:
        root, turns = carry
        return jnp.any(abs(root * root - square) > 1e-3 * square) & (turns < _MOST_TURNS)

    def turn(carry: Any) -> Any:
        root, turns = carry
        return better(root), turns + 1

    root, _ = lax.while_loop(far, turn, (square, 0))
    return better(better(root))


def _parts(function: Callable[[Any], Any], x: Any) -> Any:
    """A function of each half of an array, which may speak to the other."""
    devices = jax.devices()[:2]
    mesh = jax.make_mesh(
        (len(devices),), ("d",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,)
    )
    halves = PartitionSpec("d")
    return jax.shard_map(function, mesh=mesh, in_specs=halves, out_specs=halves)(x)


_SHARED = {"jax": jax, "jnp": jnp, "lax": lax, "newton": _newton, "parts": _parts}
SCALED = {**_SHARED, "ops": ops, "q8": _q8, "product": _product, "step": _scaled_step}
PLAIN = {
    **_SHARED,
    "ops": _PlainOps(),
    "q8": _rounded,
    "product": _matrix_product,
    "step": _step,
}
