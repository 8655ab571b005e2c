"""Trouble that users of FP8 libraries report, and what shows that it is not had here.

`TROUBLE` names the tests of each, which lie beside what they test; those that belong to no single
module are below.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from tests.gradients import jit
from tests.h200 import compile_program, spec
from unitscale import ScaledArray, nn, ops, to_array
from unitscale.quant import Block, Contraction, Dynamic, MatmulConfig
from unitscale.transforms import scalify

from .products import three_products

TESTS = Path(__file__).parents[1]
HERE = "quant/test_trouble.py::"

TROUBLE = {
    "accumulated gradients keep the amax of the last microbatch only": (
        "quant/test_state.py::test_gradient_accumulation_keeps_the_largest_amax",
        "quant/test_nnx.py::test_accumulation_is_one_step_of_the_history",
    ),
    "an amax of the local shard turns into NaN under tensor parallelism": (
        "quant/test_state.py::test_tensor_parallel_amax_is_global",
        "quant/test_state.py::test_manual_data_parallel_amax_is_global",
        HERE + "test_dynamic_scales_are_those_of_the_whole_tensor",
    ),
    "amax state is clipped and decayed as if it were a gradient": (
        "quant/test_nnx.py::test_clipping_and_decay_never_see_the_state",
    ),
    "tensors and blocks of zeros have NaN for a scale": (
        "quant/test_amax.py::test_an_amax_that_says_nothing_has_scale_1",
        "quant/test_quantize.py::test_blocks_of_zeros_beside_others",
        "quant/test_state.py::test_unused_and_all_zero_tensors_leave_their_scale",
        "quant/test_strategies.py::test_all_zero_tensors_give_zeros",
    ),
    "operands and their transposes stay, so that FP8 takes more memory than bfloat16": (
        "quant/test_strategies.py::test_the_backward_keeps_8_bit_operands_and_scales",
        "quant/test_h200.py::test_the_backward_reads_8_bit_residuals",
        HERE + "test_the_backward_of_layers_keeps_less_than_in_bfloat16",
        HERE + "test_a_step_on_a_gpu_takes_less_memory_than_in_bfloat16",
    ),
    "a scale that is not fused costs the speed-up, and nobody is told": (
        "quant/test_contraction.py::test_products_are_emitted_in_the_direct_form",
        "quant/test_check.py::test_a_program_that_lost_its_operands",
        "quant/test_h200.py::test_scales_per_tensor_are_inside_the_products",
    ),
    "jax.grad outside of a transformation drops a custom_vjp inside": (
        "transforms/test_rules_custom.py::test_the_users_rule_is_used_outside_too",
    ),
    "infinities and zeros turn logsumexp, log_softmax, var and LayerNorm into NaN": (
        "transforms/test_numerics.py::test_same_pattern_of_infinities_and_nans",
        "transforms/test_numerics.py::test_special_zero",
        "ops/test_norm.py::test_an_array_of_zeros_has_finite_gradients",
        "ops/test_softmax.py::test_masked_logits",
        HERE + "test_gradients_are_not_finite_only_where_those_of_jax_are",
    ),
    "factors of one's own loss or layer have to be derived by hand": (
        HERE + "test_a_function_of_ones_own_gets_its_factors",
        HERE + "test_a_loss_of_ones_own_needs_no_factors",
    ),
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_each_has_its_tests(trouble: str) -> None:
    for test in TROUBLE[trouble]:
        path, _, name = test.partition("::")
        tree = ast.parse((TESTS / path).read_text("utf-8"))
        assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, test


MATMUL = Contraction("bk", "kn", "bn")


@pytest.mark.parametrize("strategy", [Dynamic(), Dynamic("channel"), Block(4)], ids=str)
def test_dynamic_scales_are_those_of_the_whole_tensor(strategy) -> None:
    """The sum is over four devices, one of which has the largest element of each operand."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = jnp.full((4, 8), 1e-3).at[1, 2].set(-3e4)
    w = jnp.full((8, 8), 1e-5).at[2, 0].set(600.0)
    config = MatmulConfig(cotangent="e5m2", strategy=strategy)
    dy = jnp.full((4, 8), 1e-7).at[1, 0].set(3.0)
    *whole, _ = jit(three_products(config, MATMUL))(x, w, dy)
    assert all(np.all(np.isfinite(leaf)) and np.any(leaf) for leaf in whole)
    shares = (
        jax.device_put(a, NamedSharding(mesh, P(*axes)))
        for a, axes in ((x, ("data", "model")), (w, ("model", "data")), (dy, ("data", "model")))
    )
    # float32 sums of at most 8 terms, in another order.
    *parts, _ = jit(three_products(config, MATMUL))(*shares)
    for a, b in zip(parts, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=8 * 2.0**-24 * np.max(np.abs(b)))


def mlps(policy: str, specs: Any = lambda x: x) -> tuple[Any, Any]:
    """The loss of four MLPs and its arguments, shapes only."""
    make = lambda rngs: nn.MLP(256, 1024, use_bias=False, policy=policy, rngs=rngs)  # noqa: E731
    graphdef, params, rest = nnx.split(
        nnx.eval_shape(lambda: nnx.List(make(nnx.Rngs(0)) for _ in range(4))), nnx.Param, ...
    )

    def loss(params, rest, x):
        for layer in nnx.merge(graphdef, params, rest):
            x = layer(x)
        return jnp.mean(x.value.astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((8192, 256), jnp.bfloat16)
    return loss, jax.tree.map(specs, (params, rest, x))


@pytest.mark.parametrize("policy", ["fp8", "fp8_dynamic", "fp8_delayed", "mxfp8"])
def test_the_backward_of_layers_keeps_less_than_in_bfloat16(policy: str) -> None:
    """Per token and MLP: in bfloat16 2 w + 4 w before and 4 w after gelu, in FP8 half of w + 4 w.

    Weights are saved in 8 bits too. Scales, the most of them with blocks, are a 32nd of that.
    """

    def kept(policy: str) -> int:
        loss, args = mlps(policy)
        vjp = jax.eval_shape(lambda *args: jax.vjp(loss, *args)[1], *args)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(vjp))

    activations, weights = 4 * 8192 * 256 * (1 + 4), 4 * 2 * 256 * 1024
    saved = kept("bfloat16") - kept(policy)
    assert saved >= (activations + weights) * (1 - 1 / 32)


@pytest.mark.h200
def test_a_step_on_a_gpu_takes_less_memory_than_in_bfloat16() -> None:
    """Of 18 bytes per token and width that wait for the backward FP8 saves 5.

    Transposed copies that stayed would cost 5.
    """

    def temporaries(policy: str) -> int:
        loss, args = mlps(policy, lambda x: spec(x.shape, x.dtype))
        analysis: Any = compile_program(jax.value_and_grad(loss), *args).memory_analysis()
        return analysis.temp_size_in_bytes

    assert temporaries("fp8") < temporaries("bfloat16")


CAREFUL = {
    "logsumexp": jax.nn.logsumexp,
    "log_softmax": lambda x: jax.nn.log_softmax(x)[..., 0],
    "var": lambda x: jnp.var(x, axis=-1),
    "layer norm": lambda x: (
        (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    )[..., 0],
}
X = jnp.asarray([[0.5, -2.0, 3.0, 1.0], [0.0, 1.5, -0.25, 7.0]])
INPUTS = {
    "finite": X,
    "zeros": 0 * X,
    "masked": X.at[0, 1].set(-jnp.inf),
    "infinite": X.at[1, 3].set(jnp.inf),
}


@pytest.mark.parametrize("name", CAREFUL)
def test_gradients_are_not_finite_only_where_those_of_jax_are(name: str) -> None:
    def loss(x):
        return jnp.sum(CAREFUL[name](x))

    plain = jit(jax.grad(loss))

    @jit
    def scaled(x, scale):
        return to_array(scalify(jax.grad(loss))(ScaledArray(x / scale, scale)))

    for kind, x in INPUTS.items():
        wanted = np.asarray(plain(x))
        for scale in (1.0, 2.0**12, 2.0**-12):
            found = np.asarray(scaled(x, jnp.float32(scale)))
            message = f"{kind}, scale {scale}"
            np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted), message)
            good = np.isfinite(wanted)
            # Cancellation in x - mean is of the size of x: rounded a few times.
            bound = 64 * 2.0**-24 * np.max(np.abs(wanted[good]), initial=1.0)
            np.testing.assert_allclose(found[good], wanted[good], rtol=0, atol=bound)


def softcap(x):
    return 3 * jnp.tanh(x / 3) + 0.1 * jnp.square(x)


def test_a_function_of_ones_own_gets_its_factors() -> None:
    """Output and gradient have unit variance and RMS, up to four errors of 2**16 samples."""
    x, dy = jax.random.normal(jax.random.key(0), (2, 2**16))
    y, vjp = jax.vjp(lambda x: ops.elementwise(softcap, x, constraint=None).data, x)
    for sample in (y - jnp.mean(y), vjp(dy)[0]):
        square = np.float64(sample) ** 2
        error = np.std(square) / np.sqrt(square.size)
        assert abs(np.mean(square) - 1) < 4 * error


def test_a_loss_of_ones_own_needs_no_factors() -> None:
    """The same value and gradient, whatever the scale of the weights."""

    def loss(w, x, y):
        error = jnp.abs(jnp.tanh(x @ w) - y)
        huber = jnp.where(error < 0.5, jnp.square(error), error - 0.25)
        return jnp.mean(huber) + 1e-3 * jnp.log(jnp.sum(jnp.square(w)))

    w, x, y = (jax.random.normal(jax.random.key(i), (16, 16)) for i in range(3))
    scale = jnp.float32(2.0**14)
    scaled = ScaledArray(w / scale, scale)
    value, grad = to_array(jit(scalify(jax.value_and_grad(loss)))(scaled, x, y))
    wanted, gradient = jit(jax.value_and_grad(loss))(w, x, y)
    # 256 terms in float32.
    np.testing.assert_allclose(value, wanted, rtol=256 * 2.0**-24)
    np.testing.assert_allclose(grad, gradient, rtol=0, atol=256 * 2.0**-24)
