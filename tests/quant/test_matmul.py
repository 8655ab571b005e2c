"""`contract`, `scaled_matmul` and `Multiplier` against float64 matmuls of NumPy."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from recipes.bench.wire import collectives
from tests.gradients import jit
from tests.parallel.devices import explicit_mesh, mesh_of
from tests.products import conversions
from unitscale.core import ScaledArray, is_scaled
from unitscale.quant import (
    Block,
    Contraction,
    Delayed,
    Dynamic,
    MatmulConfig,
    Multiplier,
    Static,
    Unit,
    contract,
    quantize,
    scaled_matmul,
)

from .products import forward, state_of, three_products

DENSE = Contraction("bk", "kn", "bn")
RNG = np.random.default_rng(0)


def einsum(spec: Contraction, lhs: Any, rhs: Any) -> np.ndarray:
    return np.einsum(f"{spec.lhs},{spec.rhs}->{spec.out}", lhs, rhs)


# Scales: whatever they are, the result is the matmul of the values.

SPEC = Contraction("bk", "kn", "nb")
LHS, RHS = (RNG.integers(-8, 9, shape).astype(np.float32) for shape in ((3, 8), (8, 4)))
SCALES = {
    "none": (None, None),
    "numbers": (4.0, 0.5),
    "per row": (2.0 ** np.arange(3)[:, None], 1),
    "both": (2.0 ** np.arange(3)[:, None], 2.0 ** -np.arange(4)[None]),
    "along the sum": (2.0 ** np.arange(8)[None], 2.0),
}


def scaled(x: Any, scale: Any) -> ScaledArray:
    return ScaledArray(jnp.asarray(x, jnp.float8_e4m3fn), scale)


@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
def test_scales_multiply(out: str) -> None:
    for name, scales in SCALES.items():
        scales = (jnp.asarray(s) if np.ndim(s) else s for s in scales)
        lhs, rhs = (scaled(x, s) for x, s in zip((LHS, RHS), scales, strict=True))
        expected = 0.25 * einsum(SPEC, np.float64(lhs.value), np.float64(rhs.value))
        y = scaled_matmul(lhs, rhs, SPEC, 0.25, out)
        assert y.dtype == out
        eps = float(jnp.finfo(out).eps)
        np.testing.assert_allclose(np.float64(y), expected, rtol=eps, err_msg=name)
    y = scaled_matmul(scaled(LHS, 4.0), jnp.asarray(RHS), SPEC, 1.0, out)
    np.testing.assert_array_equal(np.float32(y), 4 * (LHS @ RHS).T)
    blocks = [quantize(x * 1e-3, "e4m3fn", Block(3), axis=i) for x, i in ((LHS, 1), (RHS, 0))]
    y = scaled_matmul(*blocks, SPEC, 1.0, "float32")
    expected = einsum(SPEC, *(np.float64(x.value) for x in blocks))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-9)


def test_scales_out_of_range() -> None:
    """2^100 * 2^100 * 2^-120 is 2^80 in any order; beside a value that overflows, zero is zero."""
    near = scaled_matmul(scaled(LHS, 1), scaled(RHS, 1), SPEC, 1.0, "float32")
    for scale, factor, total in ((2.0**100, 2.0**-120, 2.0**80), (2.0**-100, 2.0**120, 2.0**-80)):
        lhs, rhs = (scaled(x, jnp.float32(scale)) for x in (LHS, RHS))
        far = jax.jit(lambda a, b, f=factor: scaled_matmul(a, b, SPEC, f, "float32"))(lhs, rhs)
        np.testing.assert_array_equal(far, near * total)
    for dtype in ("float32", "bfloat16"):
        lhs, rhs = scaled([[1.0], [0.0]], 2.0**100), scaled([[1.0]], 2.0**100)
        y = scaled_matmul(lhs, rhs, DENSE, 1.0, dtype)
        assert y[0, 0] > 2.0**127
        assert y[1, 0] == 0


def test_matmuls_are_emitted_in_the_direct_form() -> None:
    """The dot of 8-bit data into bfloat16, then one multiplication by all scales and factors."""
    lhs, rhs = scaled(LHS, jnp.float32(4)), scaled(RHS, jnp.float32(8))
    jaxpr = jax.make_jaxpr(lambda a, b: scaled_matmul(a, b, SPEC, 0.25, "bfloat16"))(lhs, rhs)
    arrays = [e for e in jaxpr.eqns if any(v.aval.shape for v in e.outvars)]
    assert [e.primitive.name for e in arrays] == ["dot_general", "transpose", "mul"]
    types = [[v.aval.dtype.name for v in e.invars] for e in arrays]
    assert types == [["float8_e4m3fn"] * 2, ["bfloat16"], ["bfloat16"] * 2]
    single = jax.make_jaxpr(lambda a, b: scaled_matmul(a, b, DENSE, 0.25, "bfloat16"))
    names = [e.primitive.name for e in single(lhs.data, rhs.data).eqns]
    assert names == ["dot_general", "mul"]


# Every strategy, in every layout.

LAYOUTS = {
    "dense": (Contraction("btk", "kn", "btn"), (2, 3, 8), (8, 6)),
    "batch": (Contraction("abk", "akn", "abn"), (2, 3, 10), (2, 10, 5)),
    "two sums": (Contraction("abk", "kan", "nb"), (2, 3, 6), (6, 2, 4)),
    "batch last": (Contraction("kba", "kna", "bna"), (8, 3, 2), (8, 4, 2)),
}
STATIC = (0.125, 4.0, 2.0**-12)
STRATEGIES = [
    Unit(),
    Dynamic(),
    Dynamic(margin=2),
    Dynamic("channel"),
    Static(STATIC),
    Delayed(history=2),
    Block(4),
    Block(4, 2, "float32"),
]
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
CASES = [
    *itertools.product(["batch"], [(E4M3, E4M3, E5M2)], STRATEGIES),
    *itertools.product(["dense", "two sums"], [(E4M3, E4M3, E4M3)], [STRATEGIES[3], STRATEGIES[6]]),
    ("dense", (E5M2, E4M3, E4M3), Dynamic()),
    ("batch last", (E4M3, E5M2, E4M3), Unit()),
]


def cast(x: np.ndarray, name: str) -> np.ndarray:
    top = float(ml_dtypes.finfo(name).max)
    return np.clip(x, -top, top).astype(np.float32).astype(name).astype(np.float64)


def reference(spec: Contraction, formats: Any, strategy: Any, lhs: Any, rhs: Any, dy: Any) -> list:
    """Values of the three matmuls of quantized values, and a bound of their float32 rounding."""

    def quantized(x, labels, summed, which):
        stored = isinstance(strategy, Static | Delayed)
        axes = tuple(axis for axis, c in enumerate(labels) if c in summed)
        own = Static(STATIC[which]) if stored else strategy
        q = quantize(jnp.float32(x), formats[which], own, axis=axes)
        return np.float64(q.value), 1.0 if q.scale is None else np.float64(q.full_scale)

    def bounded(s: Contraction, a, b):
        count = math.prod(n for c, n in zip(s.lhs, a.shape, strict=True) if c in s.summed)
        return einsum(s, a, b), (count + 2) * 2.0**-24 * einsum(s, abs(a), abs(b))

    def along(s, labels, summed):
        """A channel scale, broadcast over the dimensions of the result."""
        kept = [c for c in labels if c not in summed]
        small = s[tuple(slice(None) if c in kept else 0 for c in labels)]
        return np.einsum(f"{''.join(kept)},{spec.out}->{spec.out}", small, np.ones(dy.shape))

    a, s_a = quantized(lhs, spec.lhs, spec.summed, 0)
    b, s_b = quantized(rhs, spec.rhs, spec.summed, 1)
    out = [bounded(spec, a, b)]
    for grad, value, s, labels in (
        (Contraction(spec.out, spec.rhs, spec.lhs), b, s_b, spec.rhs),
        (Contraction(spec.lhs, spec.out, spec.rhs), a, s_a, spec.lhs),
    ):
        folded = 1.0
        if strategy == Dynamic("channel"):
            folded, value = along(s, labels, spec.summed), value / s
        ct, _ = quantized(dy * folded, spec.out, grad.summed, 2)
        out.append(bounded(grad, *((ct, value) if labels == spec.rhs else (value, ct))))
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
def test_three_matmuls(name: str, formats: tuple[str, ...], strategy) -> None:
    spec, *shapes = LAYOUTS[name]
    lhs, rhs = draw(0, shapes[0], 30.0), draw(1, shapes[1], 1e-3)
    config = MatmulConfig(lhs=formats[0], rhs=formats[1], cotangent=formats[2], strategy=strategy)
    state = state_of(strategy)
    if state is not None:
        state = dataclasses.replace(state, scale=jnp.asarray(STATIC))
    dy = draw(2, einsum(spec, lhs, rhs).shape, 1e-6 if strategy != Unit() else 1e5)
    *actual, _ = jit(three_products(config, spec))(lhs, rhs, dy, state)
    expected = reference(spec, formats, strategy, *(np.float64(x) for x in (lhs, rhs, dy)))
    for got, (wanted, bound) in zip(actual, expected, strict=True):
        assert np.all(np.isfinite(got))
        assert np.all(np.abs(np.float64(got) - wanted) <= bound)
    assert np.any(actual[0])


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_zeros_and_what_the_backward_pass_keeps(strategy) -> None:
    zeros, config = jnp.zeros((32, 32)), MatmulConfig(cotangent="e5m2", strategy=strategy)
    run, state = jit(three_products(config, DENSE)), state_of(strategy)
    for lhs, rhs, dy in ((zeros, zeros, zeros), (zeros, zeros + 1, zeros + 1)):
        leaves = jax.tree.leaves(run(lhs, rhs, dy, state))
        assert all(np.all(np.isfinite(leaf)) for leaf in leaves)
        np.testing.assert_array_equal(leaves[0], 0)
    vjp = jax.eval_shape(lambda *a: jax.vjp(forward(config, DENSE), *a)[1], zeros, zeros, state)
    kept: dict[str, int] = {}
    for leaf in jax.tree.leaves(vjp):
        kept[leaf.dtype.name] = kept.get(leaf.dtype.name, 0) + leaf.size
    assert kept.pop("float8_e4m3fn") == 2 * 32 * 32
    assert sum(kept.values()) < 32 * 32  # scales and the state: nothing of the size of an operand
    # Operands are quantized once, and the cotangent once for each of its scales.
    jaxpr = jax.make_jaxpr(three_products(config, DENSE))(zeros, zeros, zeros, state)
    assert conversions(jaxpr, E4M3) == [(32, 32)] * 2
    slices = isinstance(strategy, Block) or strategy == Dynamic("channel")
    assert conversions(jaxpr, E5M2) == [(32, 32)] * (2 if slices else 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("strategy", [Dynamic(), Dynamic("channel"), Block(4)], ids=str)
def test_narrow_results_and_gradients(dtype: str, strategy) -> None:
    """Scales of 2**20 and 2**-20 meet in the product, never in a float16."""
    lhs, rhs = jnp.full((4, 8), 2.0**-14, dtype), jnp.full((8, 4), 2.0**14, dtype)
    dy = jnp.full((4, 4), 2.0**-12, dtype)
    found = jit(three_products(MatmulConfig(strategy=strategy), DENSE))(lhs, rhs, dy)[:3]
    for got, wanted in zip(found, (8.0, 16.0, 2.0**-24), strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.float32(got), np.float32(jnp.asarray(wanted, dtype)))


# Dtypes, factors and transformations.

DTYPES = [  # lhs, rhs, config, result
    ("bfloat16", "float32", MatmulConfig(), "bfloat16"),
    ("float16", "float32", MatmulConfig(), "float16"),
    ("float32", "bfloat16", MatmulConfig(), "float32"),
    ("float8_e4m3fn", "float8_e5m2", MatmulConfig(rhs="e5m2"), "bfloat16"),
    ("bfloat16", "bfloat16", MatmulConfig(lhs="E4M3", rhs="E4M3", cotangent="E4M3"), "bfloat16"),
    ("bfloat16", "float32", None, "float32"),
    ("float16", "bfloat16", None, "float32"),
    ("float8_e4m3fn", "float8_e4m3fn", None, "bfloat16"),
    ("float8_e4m3fn", "float32", None, "float32"),
]


@pytest.mark.parametrize(("lhs", "rhs", "config", "result"), DTYPES)
def test_dtypes(lhs: str, rhs: str, config: MatmulConfig | None, result: str) -> None:
    """Gradients have the dtype of their operand, and saturate in 8 bits."""
    a, b = jnp.full((2, 4), 2.0, lhs), jnp.full((4, 3), 4.0, rhs)
    y, vjp = jax.vjp(lambda a, b: contract(a, b, DENSE, config=config), a, b)
    grads = vjp(jnp.full_like(y, 64))
    assert (y.dtype.name, *(g.dtype.name for g in grads)) == (result, lhs, rhs)
    top = 448 if lhs == E4M3 else 768
    for got, wanted in zip((y, *grads), (32, top, 256), strict=True):
        np.testing.assert_array_equal(np.float32(got), wanted)


def test_float16_factors_multiply_before_rounding() -> None:
    a, b = jnp.full((1, 4096), 4.0, jnp.float16), jnp.full((4096, 1), 4.0, jnp.float16)
    y = contract(a, b, DENSE, factors=(1 / 64, 1.0, 1.0))
    assert (y.dtype, y.item()) == (jnp.float16, 1024)
    tiny = jnp.full((1, 16), 2.0**-14, jnp.float16)
    assert contract(tiny, tiny.T, DENSE, factors=(4096.0, 1.0, 1.0)) == 2.0**-12
    large = jnp.full((1, 64), 448.0, jnp.float16)
    y = contract(large, large.T, DENSE, factors=(2.0**-10, 1, 1), config=MatmulConfig())
    assert y == np.float16(64 * 448**2 / 1024)
    for config in (None, MatmulConfig()):
        f = lambda a, c=config: contract(a, b, DENSE, factors=(1, 0.25, 1), config=c)  # noqa: E731
        (da,) = jax.vjp(f, a)[1](jnp.full((1, 1), 448.0, jnp.float16))
        np.testing.assert_array_equal(da, 448)


@pytest.mark.parametrize(
    ("config", "multiplier"), [(None, None), (MatmulConfig(), None), (MatmulConfig(), 3.0)]
)
def test_transformations_and_factors(config, multiplier) -> None:
    lhs, rhs, factors = draw(3, (2, 3, 8), 1.0), draw(4, (8, 4), 1.0), (0.25, 0.125, 0.5)

    def f(lhs, rhs):
        m = None if multiplier is None else jnp.float32(multiplier)
        return contract(lhs, rhs, DENSE, factors=factors, config=config, multiplier=m)

    def pull(f):
        y, vjp = jit(lambda *args: jax.vjp(f, *args))(lhs, rhs)
        return y, *jit(vjp)(jnp.cos(y))

    def looped(lhs, rhs):
        return jnp.stack([f(x, rhs) for x in lhs])

    def scanned(lhs, rhs):
        return jax.lax.scan(lambda c, x: (c, f(x, rhs)), 0, lhs)[1]

    expected = pull(looped)
    for g in (jax.vmap(f, (0, None)), scanned, jax.checkpoint(looped)):
        for actual, wanted in zip(pull(g), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)
    own = cast if config else lambda x, _: x.astype(np.float64)
    a, b, ct = (own(np.asarray(x), E4M3) for x in (lhs, rhs, np.cos(expected[0])))
    one = multiplier or 1.0
    wanted = (a @ b, ct @ b.T, np.einsum("abk,abn->kn", a, ct))
    for got, value, factor in zip(expected, wanted, factors, strict=True):
        np.testing.assert_allclose(got, one * factor * value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_dithered_cotangents_keep_their_mean(dtype: str) -> None:
    """Numbers below the middle of a step, which rounded to the nearest all go down."""
    step = float(jnp.finfo(dtype).eps)
    cotangent = jnp.linspace(1.0, 1.0 + step / 2, 4096)[:, None]

    def mean_of_gradients(config: MatmulConfig | None) -> float:
        f = lambda w: contract(jnp.ones((4096, 1)), w, DENSE, config=config)  # noqa: E731
        return jax.vjp(f, jnp.ones((1, 1)))[1](cotangent)[0].item() / 4096

    nearest = MatmulConfig(lhs="float32", rhs="float32", cotangent=dtype)
    assert mean_of_gradients(nearest) == pytest.approx(1.0, abs=step / 100)
    dithered = mean_of_gradients(dataclasses.replace(nearest, dither=True))
    assert dithered == pytest.approx(mean_of_gradients(None), abs=step / 50)
    # The largest float16 saturates, though rounded up it is beyond float16.
    config = MatmulConfig(lhs="float32", rhs="float32", dither=True)
    one = jnp.ones((1, 1), jnp.float16)
    _, vjp = jax.vjp(lambda x: contract(x, one, DENSE, config=config), one)
    assert vjp(jnp.full((1, 1), 65472, jnp.float16))[0].item() == 448


# Second derivatives are refused: they would be 0 or NaN.


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_fp8_has_one_derivative(wrap) -> None:
    x, w = (RNG.standard_normal((32, 32), np.float32) for _ in range(2))

    def penalty(config: MatmulConfig, w: Any) -> Any:
        """That of a gradient by the input, as of WGAN-GP."""
        f = lambda x: jnp.sum(jnp.tanh(contract(x, w, DENSE, config=config)))  # noqa: E731
        return jnp.sum(jax.grad(f)(x) ** 2)

    for strategy in (Unit(), Dynamic(), Block()):
        config = MatmulConfig(strategy=strategy)
        jax.eval_shape(wrap(lambda w, c=config: penalty(c, w)), w)
        with pytest.raises(TypeError, match=r"no second derivative.*policy='bfloat16'"):
            jax.eval_shape(jax.grad(wrap(lambda w, c=config: penalty(c, w))), w)
    wide = MatmulConfig(lhs="bfloat16", rhs="bfloat16", cotangent="bfloat16")
    found, expected = (
        jit(jax.grad(lambda w, c=config: penalty(c, w)))(w)
        for config in (wide, MatmulConfig(lhs="float32", rhs="float32", cotangent="float32"))
    )
    assert float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)) < 0.05


# Chunks of the left operand.

FACTORS = (0.5, 0.25, 2.0)


@pytest.mark.parametrize(
    "strategy", [None, Unit(), Dynamic("channel"), Delayed(), Block(4)], ids=str
)
def test_chunks_are_the_whole(strategy) -> None:
    x, w, dy = (jnp.asarray(RNG.normal(size=s), jnp.float32) for s in [(6, 8), (8, 5), (6, 5)])
    config = None if strategy is None else MatmulConfig(strategy=strategy)
    state = None if strategy is None else state_of(strategy)

    @jax.jit
    def both(x, w, dy):
        times = Multiplier(w, DENSE, FACTORS, config, jnp.float32, 2, state)
        found = []
        for rows in (slice(0, 2), slice(2, 6)):
            y, part = times(x[rows])
            found.append((y, *times.gradients(part, dy[rows])))
        y, dx, dw, seen = zip(*found, strict=True)
        total = jax.tree.map(lambda *a: sum(a), times.shared_gradient, *seen)
        return (jnp.concatenate(y), jnp.concatenate(dx), sum(dw), total), three_products(
            config, DENSE
        )(x, w, dy, state)

    (*found, seen), (*expected, whole) = both(x, w, dy)
    for got, wanted, factor in zip(found, expected, FACTORS, strict=True):
        np.testing.assert_allclose(got, wanted * factor, rtol=1e-6, atol=1e-6)
    if state is not None:
        ours, theirs = state.advance(seen), state.advance(whole)
        np.testing.assert_array_equal(ours.history, theirs.history)
        np.testing.assert_array_equal(ours.counts, theirs.counts)


def test_chunks_quantize_the_right_operand_once_and_its_gradient_is_wide() -> None:
    config, w = MatmulConfig(), jnp.ones((8, 5), jnp.bfloat16)
    times = Multiplier(w, DENSE, FACTORS, config, jnp.bfloat16, 3)
    y, part = times(jnp.ones((2, 8), jnp.bfloat16))
    assert is_scaled(part[0])
    dx, dw, seen = times.gradients(part, y)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert seen is times.shared_gradient is None
    single = Multiplier(w, DENSE, FACTORS, config, jnp.bfloat16, 1)
    assert single.gradients(part, y)[1].dtype == jnp.bfloat16

    def casts(x, w):
        times = Multiplier(w, DENSE, FACTORS, config, jnp.bfloat16, 3)
        return [times(rows)[0] for rows in x]

    jaxpr = jax.make_jaxpr(casts)(jnp.ones((3, 2, 8)), jnp.ones((8, 5)))
    assert sorted(conversions(jaxpr, E4M3)) == [*3 * [(2, 8)], (8, 5)]
    wide = Multiplier(w, DENSE, FACTORS, config, jnp.bfloat16, 1, forward="bfloat16")
    jaxpr = jax.make_jaxpr(lambda x: wide(x)[0])(jnp.full((2, 8), 0.3, jnp.bfloat16))
    dots = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert [v.aval.dtype.name for v in dots[0].invars] == ["bfloat16"] * 2


# Meshes.


@pytest.mark.parametrize("config", [None, MatmulConfig()], ids=["none", "fp8"])
def test_the_right_operand_of_chunks_is_gathered(config: MatmulConfig | None) -> None:
    mesh, w = mesh_of(fsdp=4), jnp.arange(32.0).reshape(8, 4) / 32

    def run(x: Any, w: Any) -> Any:
        places = {"k": (), "n": ()}
        return Multiplier(w, DENSE, FACTORS, config, jnp.float32, 1, places=places)(x)[0]

    expected = run(jnp.ones((4, 8)), w)
    with jax.set_mesh(mesh):
        x, parts = (
            jax.device_put(a, NamedSharding(mesh, P("fsdp"))) for a in (jnp.ones((4, 8)), w)
        )
        program = jax.jit(run)
        found = collectives(program.lower(x, parts).compile())
        np.testing.assert_allclose(program(x, parts), expected, rtol=1e-6)
    assert {c.kind for c in found} == {"all-gather"}


@pytest.mark.parametrize("strategy", [Dynamic(), Dynamic("channel"), Block(4)], ids=str)
def test_dynamic_scales_are_those_of_the_whole_tensor(strategy) -> None:
    """The sum is over four devices, one of which has the largest element of each operand."""
    mesh = mesh_of(data=2, model=4)
    x = jnp.full((4, 8), 1e-3).at[1, 2].set(-3e4)
    w = jnp.full((8, 8), 1e-5).at[2, 0].set(600.0)
    dy = jnp.full((4, 8), 1e-7).at[1, 0].set(3.0)
    run = jit(three_products(MatmulConfig(cotangent="e5m2", strategy=strategy), DENSE))
    *whole, _ = run(x, w, dy)
    places = P("data", "model"), P("model", "data"), P("data", "model")
    shards = [NamedSharding(mesh, place) for place in places]
    *parts, _ = run(*map(jax.device_put, (x, w, dy), shards))
    for a, b in zip(parts, whole, strict=True):
        assert np.all(np.isfinite(a))
        assert np.any(a)
        # float32 sums of at most 8 terms, in another order.
        np.testing.assert_allclose(a, b, rtol=0, atol=8 * 2.0**-24 * np.max(np.abs(b)))


EXPLICIT = {
    "none": None,
    "unit": MatmulConfig(),
    "channel": MatmulConfig(strategy=Dynamic(granularity="channel")),
    "blocks": MatmulConfig(strategy=Block(8)),
    "blocks of rows": MatmulConfig(strategy=Block(4, dims=2)),
}


@pytest.mark.parametrize(
    ("x_spec", "w_spec"),
    [
        pytest.param(P("data"), P(None, "model"), marks=pytest.mark.slow),
        (P("data", None, "model"), P("model")),
        (P(("data", "model")), P("data")),
    ],
)
def test_explicit_axes(x_spec: P, w_spec: P) -> None:
    """Value and gradients are those of one device, and gradients are sharded as their operands."""
    mesh, spec = explicit_mesh(data=2, model=2), LAYOUTS["dense"][0]
    values = [RNG.standard_normal(s, np.float32) for s in ((4, 2, 16), (16, 8))]

    @jax.jit
    def run(x: Any, w: Any) -> Any:
        def loss(x: Any, w: Any, config: MatmulConfig | None) -> jax.Array:
            return jnp.sum(jnp.sin(contract(x, w, spec, config=config, out_dtype=jnp.float32)))

        return [jax.value_and_grad(loss, (0, 1))(x, w, config) for config in EXPLICIT.values()]

    expected = run(*values)
    with jax.set_mesh(mesh):
        operands = [jax.device_put(*pair) for pair in zip(values, (x_spec, w_spec), strict=True)]
        found = run(*operands)
        for name, got, wanted in zip(EXPLICIT, found, expected, strict=True):
            for gradient, operand in zip(got[1], operands, strict=True):
                assert jax.typeof(gradient).sharding == jax.typeof(operand).sharding, name
            for a, e in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
                size = float(np.max(np.abs(e)))
                np.testing.assert_allclose(a, e, rtol=0, atol=1e-4 * size, err_msg=name)
