"""Every matmul of dense layers in a training step becomes an FP8 kernel on an H200."""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from recipes.bench.aot import compile_h200, h200_topology
from recipes.bench.wire import collectives
from tests.h200 import FP8_GEMM, library_calls
from tests.nn.table import Decoder
from unitscale import nn, ops
from unitscale.ops import Implementation
from unitscale.parallel import make_mesh, param_shardings
from unitscale.quant import check_fp8

pytestmark = pytest.mark.h200
OPTIMIZED = True

LAYERS, WIDTH, VOCAB, BATCH, TIME = 2, 256, 1024, 4, 128
PRODUCTS = 18  # of a layer: three for each of its six weights, none of them merged


def make_step(policy: str, attention: Implementation = "auto") -> tuple[Any, tuple[Any, ...]]:
    """Make a step of Adam, and the shapes of its arguments."""
    options = {"vocab": VOCAB, "layers": LAYERS, "context": TIME, "hidden": 4 * WIDTH}
    options |= {"policy": policy, "attention_implementation": attention}
    model = nnx.eval_shape(lambda: Decoder(WIDTH, **options))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(1e-3)

    def step(params, rest, state, ids):
        def loss(model):
            return ops.softmax_cross_entropy(model(ids[:, :-1]), ids[:, 1:])

        model = nnx.merge(graphdef, params, rest)
        _, grads = nn.value_and_grad(loss)(model)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), nnx.state(model, nnx.Not(nnx.Param)), state

    state = jax.eval_shape(optimizer.init, params)
    return step, (params, rest, state, jax.ShapeDtypeStruct((BATCH, TIME + 1), jnp.int32))


def train_step(policy: str, attention: Implementation = "auto") -> str:
    step, arguments = make_step(policy, attention)
    return compile_h200(step, *arguments).as_text()


@pytest.mark.parametrize("policy", ["fp8", "fp8_dynamic", "fp8_delayed", "fp8_static"])
def test_every_dense_product_of_a_train_step_is_fp8(policy: str) -> None:
    program = train_step(policy)
    counts = Counter(library_calls(program))
    assert counts[FP8_GEMM] == PRODUCTS * LAYERS
    # Two of the three gradients by the projections' common input are added inside their products.
    assert len(re.findall(r'f8".*"beta":1\b', program)) == 2 * LAYERS
    # Only the readout stays in 16 bits. Attention's own matmuls are in its kernel.
    for line in program.splitlines():
        if '"__cublas$lt$matmul"' in line:
            (shape,) = re.findall(r"= \(?\w+\[([\d,]+)\]", line)
            sizes = [int(n) for n in shape.split(",")]
            assert VOCAB in sizes or sizes == [BATCH * TIME, WIDTH], line


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("attention", "kernels"), [("auto", LAYERS), ("cudnn", LAYERS), ("plain", 0)]
)
def test_attention_of_a_train_step_is_one_kernel(
    policy: str, attention: Implementation, kernels: int
) -> None:
    counts = Counter(library_calls(train_step(policy, attention)))
    assert not counts[FP8_GEMM]
    assert counts["__cudnn$fmhaSoftmax"] == kernels
    assert counts["__cudnn$fmhaSoftmaxBackward"] == kernels


def test_a_divided_step_gathers_weights_in_8_bits() -> None:
    """Four devices, each with a shard of every matrix and all heads of its own sequences."""
    mesh = make_mesh({"fsdp": 4}, devices=h200_topology(4).devices)
    step, (*state, ids) = make_step("fp8")
    places = (*param_shardings(state, mesh), NamedSharding(mesh, P("fsdp")))
    # As of a table of so many rows that nothing divides, which activations follow if not told.
    by_features = NamedSharding(mesh, P(None, "fsdp"))
    places = jax.tree_util.tree_map_with_path(
        lambda path, place: by_features if "embedding" in jax.tree_util.keystr(path) else place,
        places,
    )
    arguments = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (*state, ids),
        places,
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = compile_h200(jax.jit(step, out_shardings=places[:-1]), *arguments)
    counts = Counter(library_calls(program.as_text()))
    assert counts["__cudnn$fmhaSoftmax"] == LAYERS
    largest = max(c.size for c in collectives(program) if c.kind == "all-gather")
    # One byte for each entry of six matrices a layer; XLA may put other small arrays with them.
    assert LAYERS * 12 * WIDTH**2 <= largest <= 1.01 * LAYERS * 12 * WIDTH**2
    # Rows of the table come, and their gradients go.
    assert sum(c.kind == "all-to-all" for c in collectives(program)) <= 2


@pytest.mark.parametrize("policy", ["fp8", "fp8_delayed"])
def test_every_product_of_experts_is_fp8(policy: str) -> None:
    """A gated block has nine matmuls, each in a loop over blocks of rows; the router is float32."""
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


@pytest.mark.parametrize("activation", ["gelu", "silu_glu"])
def test_hidden_units_are_computed_again_beside_their_gradients(activation: str) -> None:
    width, shape = 768, (8, 1024, 768)
    options = {"activation": activation, "hidden_features": 4 * width, "use_bias": False}
    options |= {"is_causal": True, "policy": "fp8"}
    stack = nnx.eval_shape(lambda: nn.TransformerStack(1, width, 12, **options, rngs=nnx.Rngs(0)))
    graphdef, params, rest = nnx.split(stack, nnx.Param, ...)

    def step(params, rest, x, dy):
        y, pull = jax.vjp(
            lambda *args: nnx.merge(graphdef, args[0], rest)(args[1]).value, params, x
        )
        return y, pull(dy)

    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    text = compile_h200(step, params, rest, x, x).as_text()
    kernels = [line.split(" fusion(")[0] for line in text.splitlines() if " fusion(" in line]
    gradients = 2 if "glu" in activation else 1
    # The hidden units of the forward pass; and recomputed ones with their gradients, in one kernel.
    written = [results.count("f8e4m3fn[8,1024,3072]") for results in kernels]
    assert sorted(n for n in written if n) == [1, 1 + gradients]
    # The recomputed units and their gradients are transposed in words of four tokens.
    words = [results for results in kernels if "u32[3072,8,256]" in results]
    assert len(words) == 1 + gradients
    # The cast of a weight writes both layouts.
    assert any("u32[3072,192]" in r and "u32[768,768" in r for r in kernels)


@pytest.mark.parametrize("preset", ["fp8", "fp8_dynamic", "served"])
def test_converted_layers_are_fp8_kernels(preset: str) -> None:
    def make():
        rngs, bf16 = nnx.Rngs(0), jnp.bfloat16
        up = nnx.Linear(256, 512, use_bias=False, dtype=bf16, rngs=rngs)
        mix = nnx.Einsum("btk,kn->btn", (512, 256), dtype=bf16, rngs=rngs)
        model = nnx.Sequential(up, jax.nn.gelu, mix)
        nn.convert(model, "fp8_static" if preset == "served" else preset)
        if preset == "served":
            nn.to_static(model)
        return model

    graphdef, state = nnx.split(nnx.eval_shape(make))

    def forward(state, x):
        return nnx.merge(graphdef, state)(x)

    def gradient(state, x):
        loss = lambda *args: jnp.sum(forward(*args).astype(jnp.float32) ** 2)  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(state, x)

    x = jax.ShapeDtypeStruct((4, 128, 256), jnp.bfloat16)
    report = check_fp8(compile_h200(forward if preset == "served" else gradient, state, x))
    assert report, report
    assert (len(report.fp8), len(report.wide)) == (2 if preset == "served" else 6, 0)
    # Activations, weight and cotangent of two layers; unit scaling needs none.
    assert report.amax_reductions == (6 if preset == "fp8_dynamic" else 0)
    if preset == "served":  # inputs are cast, weights are not
        assert report.casts == 2
