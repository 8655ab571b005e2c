"""FP8 takes less memory than bfloat16: what layers keep for the backward pass, and a GPU's step."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from recipes.bench.aot import compile_h200
from unitscale import nn


def mlps(policy: str) -> tuple[Any, Any]:
    """The loss of two MLPs and its arguments, shapes only."""
    make = lambda rngs: nn.MLP(256, 1024, use_bias=False, policy=policy, rngs=rngs)  # noqa: E731
    graphdef, params, rest = nnx.split(
        nnx.eval_shape(lambda: nnx.List(make(nnx.Rngs(0)) for _ in range(2))), nnx.Param, ...
    )

    def loss(params, rest, x):
        for layer in nnx.merge(graphdef, params, rest):
            x = layer(x)
        return jnp.mean(x.value.astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((8192, 256), jnp.bfloat16)
    return loss, (params, rest, x)


@pytest.mark.parametrize("policy", ["fp8", "fp8_dynamic", "fp8_delayed", "mxfp8"])
def test_the_backward_of_layers_keeps_less_than_in_bfloat16(policy: str) -> None:
    """Per token and MLP: in bfloat16 2 w + 4 w before and 4 w after gelu, in FP8 half of w + 4 w.

    Weights are saved in 8 bits too. Scales, the most of them with blocks, are a 32nd of that. Each
    product keeps the two factors of its gradients.
    """

    def kept(policy: str) -> int:
        loss, args = mlps(policy)
        vjp = jax.eval_shape(lambda *args: jax.vjp(loss, *args)[1], *args)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(vjp))

    activations, weights, factors = 2 * 8192 * 256 * (1 + 4), 2 * 2 * 256 * 1024, 2 * 2 * 2 * 4
    saved = kept("bfloat16") - kept(policy)
    assert saved >= (activations + weights) * (1 - 1 / 32) - factors


@pytest.mark.h200
def test_a_step_on_a_gpu_takes_less_memory_than_in_bfloat16() -> None:
    """Of 18 bytes per token and width that wait for the backward FP8 saves 5.

    Transposed copies that stayed would cost 5.
    """

    def temporaries(policy: str) -> int:
        loss, args = mlps(policy)
        analysis: Any = compile_h200(jax.value_and_grad(loss), *args).memory_analysis()
        return analysis.temp_size_in_bytes

    assert temporaries("fp8") < temporaries("bfloat16")
