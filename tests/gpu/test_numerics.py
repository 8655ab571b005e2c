"""Results of a GPU with FP8 (Hopper or later) against wider formats."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.nn.table import Decoder
from tests.optim.test_scaled import check_formats
from tests.quant.products import state_of, three_products
from unitscale import nn, ops, quant

pytestmark = pytest.mark.gpu
OPTIMIZED = True


def assert_fp8_kernels(program: jax.stages.Compiled) -> None:
    report = quant.check_fp8(program)
    assert report, report


def compiled(f: Any, *args: Any) -> jax.stages.Compiled:
    return jax.jit(f).lower(*args).compile()


def drawn(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Draw normal numbers of a format, as bfloat16, which holds those of E4M3 and E5M2."""
    x = np.random.default_rng(seed).normal(size=shape)
    return x.astype(jnp.dtype(dtype)).astype(jnp.bfloat16)


def exact(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the matmul, and the matmul of the magnitudes."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return a @ b, np.abs(a) @ np.abs(b)


@pytest.mark.parametrize("strategy", [quant.Unit(), quant.Delayed(), quant.Dynamic()], ids=str)
def test_fp8_products(strategy: quant.Strategy) -> None:
    """Operands are exact in FP8, so that only sums and the rounding of results have errors.

    FP8 kernels may add 32 terms at a time with 13 bits, and results are rounded to bfloat16.
    """
    config = quant.MatmulConfig(cotangent="e5m2", strategy=strategy)
    b, k, n = 512, 256, 1024
    x, w = drawn(0, (b, k), "float8_e4m3fn"), drawn(1, (k, n), "float8_e4m3fn")
    dy = drawn(2, (b, n), "float8_e5m2")
    f = three_products(config, quant.Contraction("bk", "kn", "bn"))
    program = compiled(f, x, w, dy, state_of(strategy))
    assert_fp8_kernels(program)
    *found, _ = program(x, w, dy, state_of(strategy))
    for got, pair, terms in zip(found, ((x, w), (dy, w.T), (x.T, dy)), (k, n, b), strict=True):
        wanted, magnitude = exact(*pair)
        bound = terms / 32 * 2.0**-13 * magnitude + 2.0**-8 * np.abs(wanted)
        assert (np.abs(np.asarray(got, np.float64) - wanted) <= bound).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("taken", ["cudnn", "chunked", "plain"])
def test_attention(dtype: str, is_causal: bool, taken: ops.Implementation) -> None:
    """Forward and backward agree with float32 up to roundings of results and weights."""
    random = np.random.default_rng(0)
    shape = (2, 256, 4, 64)
    args = [random.normal(size=shape).astype(jnp.dtype(dtype)) for _ in range(4)]

    def run(implementation, q, k, v, dy):
        options = {"is_causal": is_causal, "implementation": implementation}
        y, vjp = jax.vjp(lambda *args: ops.dot_product_attention(*args, **options).data, q, k, v)
        return y, *vjp(dy)

    with ops.attention_paths() as paths:
        asked = "auto" if taken == "cudnn" else taken
        found = jax.jit(functools.partial(run, asked))(*args)
    assert [path.implementation for path in paths] == [taken]
    with jax.default_matmul_precision("float32"):
        wanted = jax.jit(functools.partial(run, "plain"))(*(x.astype(np.float32) for x in args))
    for got, reference in zip(found, wanted, strict=True):
        assert got.dtype == dtype
        error = np.linalg.norm(np.asarray(got, np.float64) - reference)
        assert error <= 8 * float(jnp.finfo(dtype).eps) * np.linalg.norm(reference)


def test_optimizer_step() -> None:
    check_formats("adam")


@pytest.mark.parametrize("policy", ["fp8", "fp8_delayed"])
def test_train_step(policy: str) -> None:
    graphdef, params, rest = nnx.split(
        Decoder(256, policy=policy, vocab=512, context=128), nnx.Param, ...
    )
    optimizer = optax.adam(0.03)
    ids = np.random.default_rng(0).integers(0, 512, (8, 129))

    def step(params, rest, state, ids):
        model = nnx.merge(graphdef, params, rest)
        loss = lambda model: model.loss(ids[:, :-1], ids[:, 1:])  # noqa: E731
        value, grads = nn.value_and_grad(loss)(model)
        updates, state = optimizer.update(grads, state, params)
        rest = nnx.state(model, nnx.Not(nnx.Param))
        return optax.apply_updates(params, updates), rest, state, value

    state = jax.jit(optimizer.init)(params)
    program = compiled(step, params, rest, state, ids)
    assert_fp8_kernels(program)
    losses = []
    for _ in range(20):
        params, rest, state, value = program(params, rest, state, ids)
        losses.append(float(value))
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 0.5
