"""Trouble that users of FP8 libraries report, and that belongs to no single module here."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from recipes.bench.aot import compile_h200
from tests.gradients import jit
from unitscale import ScaledArray, nn, ops, to_array
from unitscale.quant import Block, Contraction, Dynamic, MatmulConfig
from unitscale.transforms import scalify

from .products import three_products

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


def mlps(policy: str) -> tuple[Any, Any]:
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

    activations, weights, factors = 4 * 8192 * 256 * (1 + 4), 4 * 2 * 256 * 1024, 4 * 2 * 2 * 4
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
