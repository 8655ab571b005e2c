"""Memory traffic of an optimizer's step on an H200."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from recipes.bench.aot import compile_h200, roofline
from tests.h200 import gemms
from unitscale import grad, ops, optim
from unitscale.quant import MatmulConfig

pytestmark = pytest.mark.h200
OPTIMIZED = True

TOKENS, WIDTH, HIDDEN = 8192, 768, 3072
FP8 = MatmulConfig(cotangent="float8_e5m2")


def loss(params: Any, x: jax.Array) -> jax.Array:
    hidden = ops.gelu(ops.dense(x, params["up"], config=FP8))
    return ops.mse_loss(ops.dense(hidden, params["down"], config=FP8), jnp.zeros_like(x))


def bytes_a_parameter(tx: Any, params: Any) -> float:
    """Count bytes of kernels outside of the loss and its gradient, transpositions included."""

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        return tx.step(params, state, grad(loss)(params, x))

    x = jnp.zeros((TOKENS, WIDTH), jnp.bfloat16)
    program = compile_h200(jax.jit(step, donate_argnums=(0, 1)), params, tx.init(params), x)
    kernels = [k for k in roofline(program).kernels if "jvp" not in k.op_name]
    return sum(k.bytes for k in kernels) / (2 * WIDTH * HIDDEN)


def test_the_update_of_a_product_s_weights_is_one_pass_that_turns_nothing_around() -> None:
    """14 bytes per parameter, 1 more for the amax of the FP8 moment, and samples.

    When the matmul wrote gradients transposed, it was 46 bytes.
    """
    tx = optim.skip_nonfinite(optim.scaled(optax.adamw(1e-3)))
    params = tx.scale_params({"up": jnp.zeros((WIDTH, HIDDEN)), "down": jnp.zeros((HIDDEN, WIDTH))})
    # Whether all is finite takes a pass over the gradients, 4 bytes.
    assert bytes_a_parameter(tx, params) < 20


def test_matmuls_write_gradients_in_bfloat16() -> None:
    """No float32 array of a gradient's shape is in the program."""
    tx = optim.scaled(optax.adamw(1e-3))
    params = tx.scale_params({"up": jnp.zeros((WIDTH, HIDDEN)), "down": jnp.zeros((HIDDEN, WIDTH))})

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        return tx.step(params, state, grad(loss, gradients_dtype="bfloat16")(params, x))

    x = jnp.zeros((TOKENS, WIDTH), jnp.bfloat16)
    program = compile_h200(jax.jit(step, donate_argnums=(0, 1)), params, tx.init(params), x)
    text = program.as_text() or ""
    assert {result for result, *_ in gemms(text)} == {"bf16"}
    entry = text[text.index("ENTRY") :]
    assert not re.findall(rf"= f32\[({WIDTH},{HIDDEN}|{HIDDEN},{WIDTH})\]", entry)
