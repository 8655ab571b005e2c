"""Kernels of scalified programs on an H200."""

import re

import jax
import jax.numpy as jnp
import pytest

from recipes.bench.aot import compile_h200
from unitscale import as_scaled
from unitscale.transforms import scalify

pytestmark = pytest.mark.h200


def test_float16_products_are_written_in_float16() -> None:
    """Results of matmuls are written in float16, half the bytes of float32 sums."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    weights = as_scaled([jnp.ones((512, 512))] * 2, dtype=jnp.float16)
    x = as_scaled(jnp.ones((1024, 512)), dtype=jnp.float16)
    text = compile_h200(jax.jit(scalify(jax.value_and_grad(loss))), weights, x).as_text() or ""
    kernels = re.findall(r"= \(?(\w+)\[[^\n]*custom_call_target=\"__cublas", text)
    assert kernels == ["f16"] * 5
