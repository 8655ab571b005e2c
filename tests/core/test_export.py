"""Programs on ScaledArrays, written to bytes and read again."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from tests.batching import entry
from unitscale import ScaledArray, as_scaled, scalify, to_array


def written(exported: export.Exported) -> export.Exported:
    return export.deserialize(exported.serialize())


@pytest.mark.parametrize(
    ("scale", "block_shape"),
    [(None, None), (4.0, None), (np.float32([1, 2, 4, 8]), None), (np.full((3, 2), 2.0), (1, 2))],
    ids=["none", "one", "columns", "blocks"],
)
def test_a_program_is_read_with_its_signature(scale: Any, block_shape: Any) -> None:
    x = ScaledArray(jnp.arange(12.0).reshape(3, 4), scale, block_shape=block_shape)
    found = written(export.export(jax.jit(lambda x: (x, x.value)))(x)).call(x)
    assert jax.tree.structure(found[0]) == jax.tree.structure(x)
    np.testing.assert_array_equal(found[0].value, x.value)
    np.testing.assert_array_equal(found[1], x.value)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "product with a number": lambda x, w: x * 3,
    "product": lambda x, w: x @ w,
    "sum of two": lambda x, w: x + jnp.tanh(x @ w),
    "sum of all": lambda x, w: x.sum(),
    "mean": lambda x, w: x.mean(0),
    "cumulative sum": lambda x, w: jnp.cumsum(x, 0),
    "softmax": lambda x, w: jax.nn.softmax(x @ w),
    "choice": lambda x, w: jnp.where(x > 0, x, jnp.maximum(x, -0.5)),
    "gradient": lambda x, w: jax.grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(w),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_a_scalified_program_of_any_batch(dtype: Any) -> None:
    """A dimension that is left open has no number while tracing."""
    (batch,) = export.symbolic_shape("batch")
    rng = np.random.default_rng(0)
    w = as_scaled(jnp.asarray(rng.normal(size=(8, 8)), jnp.float32), dtype=dtype)
    x = as_scaled(jnp.asarray(rng.normal(size=(5, 8)), jnp.float32), dtype=dtype)
    signature = jax.tree.map(lambda a: jax.ShapeDtypeStruct((batch, 8)[: a.ndim], a.dtype), x)
    for name, program in PROGRAMS.items():
        with entry(name):
            exported = export.export(jax.jit(scalify(program)))(signature, w)
            found = to_array(exported.call(x, w))
            expected = program(to_array(x), to_array(w))
            # A few roundings, and XLA's tanh of float32, which errs by several units itself.
            units = 16 if dtype == jnp.float32 else 4
            atol = units * float(jnp.finfo(dtype).eps) * float(jnp.max(jnp.abs(expected)))
            np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
