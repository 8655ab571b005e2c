"""Every strategy, in every layout, against float64 products of operands quantized by NumPy."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.gradients import jit
from tests.products import conversions
from unitscale.core import ScaledArray
from unitscale.quant import (
    Block,
    Contraction,
    Delayed,
    Dynamic,
    MatmulConfig,
    Static,
    Unit,
    is_stateful,
    quantize,
)

from .products import forward, state_of, three_products

SPECS = {
    "dense": (Contraction("btk", "kn", "btn"), (2, 3, 8), (8, 6)),
    "batch": (Contraction("abk", "akn", "abn"), (2, 3, 10), (2, 10, 5)),
    "two sums": (Contraction("abk", "kan", "nb"), (2, 3, 6), (6, 2, 4)),
}
SCALES = (0.125, 4.0, 2.0**-12)
STRATEGIES = [
    Unit(),
    Dynamic(),
    Dynamic(margin=2),
    Dynamic("channel"),
    Static(SCALES),
    Delayed(history=2),
    Block(4),
    Block(4, 2, "float32"),
]
SPLIT = STRATEGIES[1], STRATEGIES[3], STRATEGIES[6]
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
CASES = [
    *itertools.product(["batch"], [(E4M3, E4M3, E5M2)], STRATEGIES),
    *itertools.product(["dense", "two sums"], [(E4M3, E4M3, E4M3)], SPLIT),
    *itertools.product(["dense"], [(E5M2, E4M3, E4M3)], SPLIT),
]


def cast(x: np.ndarray, name: str) -> np.ndarray:
    top = float(ml_dtypes.finfo(name).max)
    return np.clip(x, -top, top).astype(np.float32).astype(name).astype(np.float64)


def scale_of(x: np.ndarray, name: str, margin: int = 0) -> float:
    amax, top = np.max(np.abs(x), initial=0.0), float(ml_dtypes.finfo(name).max)
    if amax == 0:
        return 1.0
    k = math.ceil(math.log2(amax / top)) - 2
    while amax > top * 2.0**k:
        k += 1
    return 2.0 ** (k + margin)


def scales(x: np.ndarray, labels: str, summed: str, name: str, which: int, strategy) -> np.ndarray:
    """One scale for each element, slice by slice."""
    if isinstance(strategy, Unit):
        return np.ones(x.shape)
    if isinstance(strategy, Static | Delayed):
        return np.full(x.shape, SCALES[which])
    if isinstance(strategy, Dynamic) and strategy.granularity == "tensor":
        return np.full(x.shape, scale_of(x, name, strategy.margin))
    steps = [1] * x.ndim
    if isinstance(strategy, Block):
        steps[max(labels.index(c) for c in summed)] = strategy.size
        if strategy.dims == 2:
            steps[max(i for i, c in enumerate(labels) if c not in summed)] = strategy.size
    else:
        steps = [n if c in summed else 1 for c, n in zip(labels, x.shape, strict=True)]
    out = np.empty(x.shape)
    for start in itertools.product(*map(range, (0,) * x.ndim, x.shape, steps)):
        at = tuple(slice(a, a + step) for a, step in zip(start, steps, strict=True))
        out[at] = scale_of(x[at], name)
    return out


def reference(spec: Contraction, formats, strategy, lhs, rhs, dy) -> Callable:
    """Values of the three products, and a bound of the rounding of their float32 sums."""

    def quantized(x, labels, summed, which):
        s = scales(x, labels, summed, formats[which], which, strategy)
        return cast(x / s, formats[which]) * s, s

    def einsum(s: Contraction, a, b):
        terms = f"{s.lhs},{s.rhs}->{s.out}"
        count = math.prod(n for c, n in zip(s.lhs, a.shape, strict=True) if c in s.summed)
        y = np.einsum(terms, a, b)
        return y, (count + 2) * 2.0**-24 * np.einsum(terms, abs(a), abs(b))

    def along(s, labels, summed):
        """A channel scale, spread over the dimensions of the result."""
        kept = [c for c in labels if c not in summed]
        small = s[tuple(slice(None) if c in kept else 0 for c in labels)]
        return np.einsum(f"{''.join(kept)},{spec.out}->{spec.out}", small, np.ones(dy.shape))

    a, s_a = quantized(lhs, spec.lhs, spec.summed, 0)
    b, s_b = quantized(rhs, spec.rhs, spec.summed, 1)
    out = [einsum(spec, a, b)]
    for grad, saved in ((spec.grad_lhs, "rhs"), (spec.grad_rhs, "lhs")):
        value, s, labels = (b, s_b, spec.rhs) if saved == "rhs" else (a, s_a, spec.lhs)
        folded = np.ones(dy.shape)
        if strategy == Dynamic("channel"):
            folded, value = along(s, labels, spec.summed), value / s
        ct, _ = quantized(dy * folded, spec.out, grad.summed, 2)
        out.append(einsum(grad, *((ct, value) if saved == "rhs" else (value, ct))))
    return out


def draw(seed: int, shape: tuple[int, ...], size: float) -> np.ndarray:
    """Numbers of sizes that differ from slice to slice, with a zero slice."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * size
    for axis in range(len(shape)):
        x *= 2.0 ** rng.integers(-3, 4, shape[axis]).reshape([-1] + [1] * (len(shape) - axis - 1))
    x[(0,) * (len(shape) - 1)] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize(("name", "formats", "strategy"), CASES, ids=str)
def test_three_products(name: str, formats: tuple[str, ...], strategy) -> None:
    spec, *shapes = SPECS[name]
    lhs, rhs = draw(0, shapes[0], 30.0), draw(1, shapes[1], 1e-3)
    config = MatmulConfig(lhs=formats[0], rhs=formats[1], cotangent=formats[2], strategy=strategy)
    state = state_of(strategy)
    if state is not None:
        state = dataclasses.replace(state, scale=jnp.asarray(SCALES))
    y = np.einsum(f"{spec.lhs},{spec.rhs}->{spec.out}", lhs, rhs)
    dy = draw(2, y.shape, 1e-6)
    *actual, _ = jit(three_products(config, spec))(lhs, rhs, dy, state)
    expected = reference(spec, formats, strategy, *(np.float64(x) for x in (lhs, rhs, dy)))
    for got, (wanted, bound) in zip(actual, expected, strict=True):
        assert np.all(np.isfinite(got))
        assert np.all(np.abs(np.float64(got) - wanted) <= bound)
    assert np.any(actual[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("strategy", [Dynamic(), Dynamic("channel"), Block(4)], ids=str)
def test_narrow_results_and_gradients(dtype: str, strategy) -> None:
    """Scales of 2**20 and 2**-20 meet in the product, never in a float16."""
    lhs, rhs = jnp.full((4, 8), 2.0**-14, dtype), jnp.full((8, 4), 2.0**14, dtype)
    config, spec = MatmulConfig(strategy=strategy), Contraction("bk", "kn", "bn")

    dy = jnp.full((4, 4), 2.0**-12, dtype)
    y, dlhs, drhs, _ = jit(three_products(config, spec))(lhs, rhs, dy)
    assert {a.dtype.name for a in (y, dlhs, drhs)} == {dtype}
    np.testing.assert_array_equal(np.float32(y), 8.0)
    np.testing.assert_array_equal(np.float32(dlhs), 16.0)
    np.testing.assert_array_equal(np.float32(drhs), np.float32(jnp.asarray(2.0**-24, dtype)))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_all_zero_tensors_give_zeros(strategy) -> None:
    zeros, spec = jnp.zeros((4, 4)), Contraction("bk", "kn", "bn")
    run = jit(three_products(MatmulConfig(strategy=strategy), spec))
    ones = zeros + 1
    for lhs, rhs in ((zeros, zeros), (zeros, ones), (ones, zeros)):
        for dy in (zeros, ones):
            leaves = jax.tree.leaves(run(lhs, rhs, dy, state_of(strategy)))
            assert all(np.all(np.isfinite(leaf)) for leaf in leaves)
            np.testing.assert_array_equal(leaves[0], 0)


def residuals(strategy) -> dict[str, int]:
    """Elements of what the backward keeps, by dtype."""
    lhs, rhs = jnp.ones((32, 32), jnp.bfloat16), jnp.ones((32, 32))
    product = forward(MatmulConfig(strategy=strategy), Contraction("bk", "kn", "bn"))
    state = state_of(strategy)
    vjp = jax.eval_shape(lambda *a: jax.vjp(product, *a)[1], lhs, rhs, state)
    found: dict[str, int] = {}
    for leaf in jax.tree.leaves(vjp):
        found[leaf.dtype.name] = found.get(leaf.dtype.name, 0) + leaf.size
    return found


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_the_backward_keeps_8_bit_operands_and_scales(strategy) -> None:
    kept = residuals(strategy)
    assert kept.pop("float8_e4m3fn") == 2 * 32 * 32
    assert kept.pop("bfloat16", 0) == 0
    # Scales, and the state: nothing of the size of an operand.
    assert sum(kept.values()) < 32 * 32


@pytest.mark.parametrize(
    ("strategy", "casts"),
    [(Unit(), 1), (Dynamic(), 1), (Static(SCALES), 1), (Dynamic("channel"), 2), (Block(4), 2)],
    ids=str,
)
def test_operands_are_quantized_once_and_the_cotangent_once_for_each_of_its_scales(
    strategy, casts
) -> None:
    config = MatmulConfig(cotangent="e5m2", strategy=strategy)
    lhs, rhs, spec = jnp.ones((3, 8)), jnp.ones((8, 4)), Contraction("bk", "kn", "bn")

    jaxpr = jax.make_jaxpr(three_products(config, spec))(lhs, rhs, jnp.ones((3, 4)))
    assert conversions(jaxpr, "float8_e4m3fn") == [(3, 8), (8, 4)]
    assert conversions(jaxpr, "float8_e5m2") == casts * [(3, 4)]


def test_unit_takes_no_statistics() -> None:
    """Whatever the values, the scale stays; the program contains no reduction."""
    x = jnp.asarray([1e-3, 0.3, 1e3])
    assert quantize(x, "e4m3fn", Unit()).scale is None
    assert quantize(ScaledArray(x, 8.0), "e4m3fn", Unit()).scale == 8
    jaxpr = str(jax.make_jaxpr(lambda x: quantize(x, "e4m3fn", Unit()).data)(x))
    assert not re.search(r"reduce_(max|min|sum)", jaxpr)
    assert "reduce" in str(jax.make_jaxpr(lambda x: quantize(x, "e4m3fn", Dynamic()).data)(x))
    np.testing.assert_array_equal(
        # A thousandth rounds up to the smallest subnormal number.
        np.asarray(quantize(x, "e4m3fn").data, np.float32),
        [2.0**-9, 0.3125, 448],
    )


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_is_a_value(strategy) -> None:
    same = dataclasses.replace(strategy)
    assert same == strategy
    assert hash(same) == hash(strategy)
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        strategy.margin = 1
    assert hash(MatmulConfig(strategy=strategy)) == hash(MatmulConfig(strategy=same))
    assert is_stateful(strategy) == isinstance(strategy, Delayed)


def test_mxfp8_is_the_default_of_block() -> None:
    assert Block() == Block(32, 1, "e8m0")
    assert Static(4.0) == Static((4, 4.0, 4)) == Static(np.float32(4)) == Static(np.int64(4))
    assert is_stateful(Static())
    assert Static(2.0**126).scales[0] == 1 / Static(2.0**-126).scales[0]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Dynamic("row"), "Dynamic: granularity must be one of tensor, channel; got 'row'"),
        (lambda: Dynamic(margin=-1), "Dynamic: margin must be a whole number .* got -1"),
        (lambda: Dynamic(margin=0.5), "Dynamic: margin must be a whole number .* got 0.5"),
        (lambda: Delayed(history=0), "Delayed: history must be .* 1 or more; got 0"),
        (lambda: Delayed(history=True), "Delayed: history must be .* got True"),
        (lambda: Delayed(margin=-2), "Delayed: margin .* got -2"),
        (lambda: Delayed(use="mean"), "Delayed: use must be one of max, latest; got 'mean'"),
        (lambda: Static(0.0), "Static: scales must be a power of two .* got 0.0"),
        (lambda: Static(3.0), "Static: scales must be a power of two .* got 3.0"),
        (lambda: Static((1.0, 2.0)), r"or \(lhs, rhs, cotangent\), or None; got \(1.0, 2.0\)"),
        (lambda: Static((1.0, 2.0, math.nan)), "Static: scales .* nan"),
        (lambda: Static(margin=-1), "Static: margin .* got -1"),
        (lambda: Block(0), "Block: size must be .* got 0"),
        (lambda: Block(32, 3), "Block: dims must be .*got 3"),
        (lambda: Block(scale_format="bfloat16"), "scale_format must be .*got 'bfloat16'"),
    ],
)
def test_errors(make, match) -> None:
    with pytest.raises(ValueError, match=match):
        make()
