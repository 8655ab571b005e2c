"""Every Dense product of a whole training step becomes an FP8 kernel of an H200."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from tests.h200 import FP8_GEMM, library_calls
from unitscale import nn, ops
from unitscale.analysis import compile_h200
from unitscale.ops import Implementation
from unitscale.quant import check_fp8

pytestmark = pytest.mark.h200
OPTIMIZED = True

LAYERS, WIDTH, VOCAB, BATCH, TIME = 2, 256, 1024, 4, 128
# XLA merges the three gradients of the projections of attention, which share their input: a layer
# has 6 forward, 6 dx and 4 dkernel products.
MERGED = 16
# A layer that holds its own scales quantizes their common input by itself: nothing is merged, and
# each of 6 weights has its 3 products.
SEPARATE = 18


class _GPT(nnx.Module):
    def __init__(self, policy: str, attention: Implementation, rngs: nnx.Rngs) -> None:
        self.embed = nn.Embed(VOCAB, WIDTH, policy=policy, rngs=rngs)
        self.stack = nn.TransformerStack(
            LAYERS,
            WIDTH,
            4,
            is_causal=True,
            use_bias=False,
            attention_implementation=attention,
            policy=policy,
            rngs=rngs,
        )
        self.norm = nn.RMSNorm(WIDTH, policy=policy)
        self.readout = nn.Readout(WIDTH, VOCAB, policy=policy, rngs=rngs)

    def __call__(self, ids: jax.Array):
        return self.readout(self.norm(self.stack(self.embed(ids))))


def train_step(policy: str, attention: Implementation = "auto") -> str:
    graphdef, params, rest = nnx.split(
        nnx.eval_shape(lambda: _GPT(policy, attention, nnx.Rngs(0))), nnx.Param, ...
    )
    optimizer = optax.adam(1e-3)

    def step(params, rest, state, ids):
        def loss(model):
            return ops.softmax_cross_entropy(model(ids[:, :-1]), ids[:, 1:])

        model = nnx.merge(graphdef, params, rest)
        _, grads = nn.value_and_grad(loss)(model)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), nnx.state(model, nnx.Not(nnx.Param)), state

    state = jax.eval_shape(optimizer.init, params)
    ids = jax.ShapeDtypeStruct((BATCH, TIME + 1), jnp.int32)
    return compile_h200(step, params, rest, state, ids).as_text()


@pytest.mark.parametrize(
    ("policy", "products"),
    [
        ("fp8", MERGED),
        ("fp8_dynamic", MERGED),
        ("fp8_delayed", SEPARATE),
        ("fp8_static", SEPARATE),
    ],
)
def test_every_dense_product_of_a_train_step_is_fp8(policy: str, products: int) -> None:
    program = train_step(policy)
    counts = Counter(library_calls(program))
    assert counts[FP8_GEMM] == products * LAYERS
    # What is left in 16 bits: the readout. Attention's own products are in its kernel.
    for line in program.splitlines():
        if '"__cublas$lt$matmul"' in line:
            (shape,) = re.findall(r"= \(?\w+\[([\d,]+)\]", line)
            sizes = [int(n) for n in shape.split(",")]
            assert VOCAB in sizes or sizes == [BATCH * TIME, WIDTH], line


def test_no_product_is_fp8_in_bfloat16() -> None:
    assert FP8_GEMM not in library_calls(train_step("bfloat16"))


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("attention", "kernels"), [("auto", LAYERS), ("cudnn", LAYERS), ("plain", 0)]
)
def test_attention_of_a_train_step_is_one_kernel(
    policy: str, attention: Implementation, kernels: int
) -> None:
    counts = Counter(library_calls(train_step(policy, attention)))
    assert counts["__cudnn$fmhaSoftmax"] == kernels
    assert counts["__cudnn$fmhaSoftmaxBackward"] == kernels


def test_float32_has_no_kernel() -> None:
    assert not any("fmha" in name for name in library_calls(train_step("float32")))


@pytest.mark.parametrize("policy", ["fp8", "fp8_delayed"])
def test_every_product_of_experts_is_fp8(policy: str) -> None:
    """Nine in a gated block, each the body of a loop over blocks of rows; the router is float32."""
    model = nnx.eval_shape(
        lambda: nn.MoE(WIDTH, 2 * WIDTH, activation="silu_glu", policy=policy, rngs=nnx.Rngs(0))
    )
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def gradients(params, rest, x):
        def loss(model, x):
            return jnp.sum(jnp.sin(model(x).value.astype(jnp.float32)))

        model = nnx.merge(graphdef, params, rest)
        grads = nn.value_and_grad(loss, argnums=(0, 1))(model, x)[1]
        return grads, nnx.state(model, nnx.Not(nnx.Param))

    x = jax.ShapeDtypeStruct((4096, WIDTH), jnp.bfloat16)
    program = compile_h200(gradients, params, rest, x)
    products = check_fp8(program).matmuls
    assert sum(product.fp8 for product in products) == 9
    assert all("while" in product.op_name for product in products if product.fp8)
    assert {product.lhs.split("[")[0] for product in products if not product.fp8} == {"float32"}
    # Matrices are turned once, before the loop, and not for each block.
    bodies = [part for part in program.as_text().split("\n\n") if FP8_GEMM in part]
    assert not any(re.search(r"= f8\w+\[[\d,]+\]\S* transpose\(", body) for body in bodies)
