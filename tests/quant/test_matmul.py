"""`contract`, `scaled_matmul` and `Multiplier` against float64 matmuls in NumPy."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from recipes.bench.wire import collectives
from tests.gradients import jit
from tests.parallel.devices import explicit_mesh, mesh_of
from tests.products import conversions, equations
from unitscale.core import ScaledArray, format_of, is_scaled
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

from .products import state_of, three_products

DENSE = Contraction("bk", "kn", "bn")
RNG = np.random.default_rng(0)
E4M3, E5M2, E2M1 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"


def einsum(spec: Contraction, lhs: Any, rhs: Any) -> np.ndarray:
    return np.einsum(f"{spec.lhs},{spec.rhs}->{spec.out}", lhs, rhs)


# Scales: whatever they are, the result is the matmul of the values.

SPEC = Contraction("bk", "kn", "nb")
LHS, RHS = (RNG.integers(-8, 9, shape).astype(np.float32) for shape in ((3, 8), (8, 4)))


def scaled(x: Any, scale: Any) -> ScaledArray:
    return ScaledArray(jnp.asarray(x, jnp.float8_e4m3fn), jnp.asarray(scale, jnp.float32))


def test_scales_multiply() -> None:
    rows, columns, summed = (2.0 ** np.arange(n) for n in (3, 4, 8))
    pairs = [
        (jnp.asarray(LHS, E4M3), jnp.asarray(RHS, E4M3)),
        (scaled(LHS, 4.0), jnp.asarray(RHS)),
        (scaled(LHS, 4.0), scaled(RHS, 0.5)),
        (scaled(LHS, rows[:, None]), scaled(RHS, 1.0)),
        (scaled(LHS, rows[:, None]), scaled(RHS, 1 / columns[None])),
        (scaled(LHS, summed[None]), scaled(RHS, 2.0)),
        tuple(quantize(x * 1e-3, "e4m3fn", Block(3), axis=i) for x, i in ((LHS, 1), (RHS, 0))),
    ]
    outs = ["float32", "bfloat16", "float16"] * 2 + ["float32"]
    cases = list(zip(pairs, outs, strict=True))
    found = jit(
        lambda ps: [scaled_matmul(*p, SPEC, 0.25, o) for p, o in zip(ps, outs, strict=True)]
    )(pairs)
    for (pair, out), y in zip(cases, found, strict=True):
        values = [np.float64(x.value if is_scaled(x) else x) for x in pair]
        expected = 0.25 * einsum(SPEC, *values)
        # Sums of blocks are rounded; all others are of whole numbers and powers of two.
        bound = 8 * 2.0**-24 * einsum(SPEC, *map(abs, values)) if pair is pairs[-1] else 0.0
        assert y.dtype == out
        error = abs(np.float64(y) - expected)
        assert np.all(error <= bound + float(jnp.finfo(out).eps) * abs(expected)), out


def test_scales_out_of_range() -> None:
    """2^100 * 2^100 * 2^-120 is 2^80 in any order, and zeros stay zero when others overflow."""
    near = np.einsum("bk,kn->nb", LHS, RHS)
    for scale, factor, total in ((2.0**100, 2.0**-120, 2.0**80), (2.0**-100, 2.0**120, 2.0**-80)):
        far = jax.jit(lambda a, b, f=factor: scaled_matmul(a, b, SPEC, f, "float32"))
        found = far(scaled(LHS, scale), scaled(RHS, scale))
        np.testing.assert_array_equal(found, near * total)
    for dtype in ("float32", "bfloat16"):
        lhs, rhs = scaled([[1.0], [0.0]], 2.0**100), scaled([[1.0]], 2.0**100)
        y = jax.jit(lambda a, b, d=dtype: scaled_matmul(a, b, DENSE, 1.0, d))(lhs, rhs)
        assert y[0, 0] > 2.0**127
        assert y[1, 0] == 0


def test_matmuls_are_emitted_in_the_direct_form() -> None:
    """A dot of 8-bit data to bfloat16, then one multiplication by all scales and factors."""
    lhs, rhs = scaled(LHS, 4), scaled(RHS, 8)
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
    *(Unit(), Dynamic(), Dynamic("channel"), Static(STATIC), Delayed(history=2)),
    *(Block(4), Block(4, 2, "float32")),
]
FP4 = Block(4, (1, 2, 1), "e4m3fn", tensor_scale=True)
CASES = [
    *(("batch", (E4M3, E4M3, E5M2), strategy) for strategy in STRATEGIES),
    ("dense", (E2M1, E2M1, E2M1), FP4),
    ("two sums", (E4M3, E4M3, E4M3), Dynamic("channel")),
    ("two sums", (E4M3, E4M3, E4M3), Block(4)),
    ("dense", (E5M2, E4M3, E4M3), Dynamic()),
    ("batch last", (E4M3, E5M2, E4M3), Unit()),
]


def draw(seed: int, shape: tuple[int, ...], size: float) -> np.ndarray:
    """Draw slices of different magnitudes, one of them zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * size
    for axis in range(len(shape)):
        x *= 2.0 ** rng.integers(-3, 4, shape[axis]).reshape([-1] + [1] * (len(shape) - axis - 1))
    x[(0,) * (len(shape) - 1)] = 0
    return x.astype(np.float32)


def quantized(spec: Contraction, formats: Any, strategy: Any, lhs: Any, rhs: Any, dy: Any) -> Any:
    """Return both operands of the three matmuls, rounded to their formats."""

    def one(x, labels, summed, which):
        stored = isinstance(strategy, Static | Delayed)
        axes = tuple(axis for axis, c in enumerate(labels) if c in summed)
        own = Static(STATIC[which]) if stored else strategy
        own = own.of_operand(which) if isinstance(own, Block) else own
        return quantize(x, formats[which], own, axis=axes)

    a, b = one(lhs, spec.lhs, spec.summed, 0), one(rhs, spec.rhs, spec.summed, 1)
    pairs = [(a.value, b.value)]
    for grad, x, labels in ((spec.grad_lhs, b, spec.rhs), (spec.grad_rhs, a, spec.lhs)):
        if isinstance(strategy, Block):  # blocks along the dimension that this matmul sums over
            x = one(lhs, labels, grad.summed, 0) if x is a else one(rhs, labels, grad.summed, 1)
        value, ct = x.value, dy
        if strategy == Dynamic("channel"):  # the cotangent takes the scale of each channel
            kept = "".join(c for c in labels if c not in spec.summed)
            small = x.scale[tuple(slice(None) if c in kept else 0 for c in labels)]
            ct = ct * jnp.einsum(f"{kept},{spec.out}->{spec.out}", small, jnp.ones(dy.shape))
            value = x.data.astype(jnp.float32)
        ct = one(ct, spec.out, grad.summed, 2).value
        pairs.append((ct, value) if labels == spec.rhs else (value, ct))
    return pairs


@pytest.mark.parametrize(
    "part", [CASES[:8], pytest.param(CASES[8:], marks=pytest.mark.slow)], ids=["batch", "others"]
)
def test_three_matmuls(part) -> None:
    """Results equal the matmuls of quantized values, up to the rounding of float32 sums."""
    cases = []
    for name, _, strategy in part:
        spec, *shapes = LAYOUTS[name]
        lhs, rhs = draw(0, shapes[0], 30.0), draw(1, shapes[1], 1e-3)
        dy = draw(2, einsum(spec, lhs, rhs).shape, 1e-6 if strategy != Unit() else 1e5)
        state = state_of(strategy)
        if state is not None:
            state = dataclasses.replace(state, scale=jnp.asarray(STATIC))
        cases.append(((lhs, rhs, dy), state))

    @jit
    def run(cases):
        results = []
        for (name, formats, strategy), (tensors, state) in zip(part, cases, strict=True):
            lhs, rhs, cotangent = formats
            config = MatmulConfig(lhs=lhs, rhs=rhs, cotangent=cotangent, strategy=strategy)
            spec = LAYOUTS[name][0]
            found = three_products(config, spec)(*tensors, state)[:3]
            results.append((found, quantized(spec, formats, strategy, *tensors)))
        return results

    for case, (found, operands) in zip(part, run(cases), strict=True):
        spec = LAYOUTS[case[0]][0]
        assert np.any(found[0])
        specs = spec, spec.grad_lhs, spec.grad_rhs
        for own, got, pair in zip(specs, found, operands, strict=True):
            a, b = map(np.float64, pair)
            count = math.prod(n for c, n in zip(own.lhs, a.shape, strict=True) if c in own.summed)
            bound = (count + 2) * 2.0**-24 * einsum(own, abs(a), abs(b))
            assert np.all(np.abs(np.float64(got) - einsum(own, a, b)) <= bound), case


def test_zeros_and_narrow_results() -> None:
    """The scales 2**20 and 2**-20 are combined in float32, not in float16."""
    strategies = Dynamic(), Dynamic("channel"), Block(4), Delayed()
    configs = [MatmulConfig(cotangent="e5m2", strategy=strategy) for strategy in strategies]
    program = jit(lambda *a: [three_products(c, DENSE)(*a, state_of(c.strategy)) for c in configs])
    sizes = ((4, 8), 2.0**-14), ((8, 4), 2.0**14), ((4, 4), 2.0**-12)
    args = lhs, rhs, dy = [jnp.full(*size, "float16") for size in sizes]
    for given in ((0 * lhs, 0 * rhs, 0 * dy), (0 * lhs, rhs, dy)):
        for found in program(*given):
            assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(found))
            np.testing.assert_array_equal(found[0], 0)
    for *found, _ in program(*args)[:3]:
        for got, wanted in zip(found, (8.0, 16.0, 2.0**-24), strict=True):
            assert got.dtype == "float16"
            np.testing.assert_array_equal(np.float32(got), np.float32(wanted))


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


def test_dtypes() -> None:
    """Gradients have the dtype of their operand, and saturate in 8 bits."""

    def run(lhs, rhs, config):
        a, b = jnp.full((2, 4), 2.0, lhs), jnp.full((4, 3), 4.0, rhs)
        y, vjp = jax.vjp(lambda a, b: contract(a, b, DENSE, config=config), a, b)
        return y, *vjp(jnp.full_like(y, 64))

    for case, found in zip(DTYPES, jit(lambda: [run(*c[:3]) for c in DTYPES])(), strict=True):
        lhs, rhs, _, result = case
        assert tuple(x.dtype.name for x in found) == (result, lhs, rhs), case
        for got, wanted in zip(found, (32, 448 if lhs == E4M3 else 768, 256), strict=True):
            np.testing.assert_array_equal(np.float32(got), wanted)


def test_float16_factors_multiply_before_rounding() -> None:
    half = lambda shape, value: jnp.full(shape, value, jnp.float16)  # noqa: E731
    a, b, configs = half((1, 4096), 4.0), half((4096, 1), 4.0), (None, MatmulConfig())
    tiny, large = half((1, 16), 2.0**-14), half((1, 64), 448.0)

    def gradient(config):
        f = lambda a: contract(a, b, DENSE, factors=(1, 0.25, 1), config=config)  # noqa: E731
        return jax.vjp(f, a)[1](half((1, 1), 448.0))[0]

    @jit
    def run():
        return (
            contract(a, b, DENSE, factors=(1 / 64, 1.0, 1.0)),
            contract(tiny, tiny.T, DENSE, factors=(4096.0, 1.0, 1.0)),
            contract(large, large.T, DENSE, factors=(2.0**-10, 1, 1), config=MatmulConfig()),
            *map(gradient, configs),
        )

    for y, wanted in zip(run(), (1024, 2.0**-12, 64 * 448**2 / 1024, 448, 448), strict=True):
        assert y.dtype == jnp.float16
        np.testing.assert_array_equal(y, np.float16(wanted))


@pytest.mark.parametrize(
    ("config", "multiplier"), [(None, np.float32(3.0)), (MatmulConfig(), jnp.float32(3.0))]
)
def test_transformations_and_factors(config, multiplier) -> None:
    operands = draw(3, (2, 3, 8), 1.0), draw(4, (8, 4), 1.0), draw(5, (2, 3, 4), 1.0)
    factors = 0.25, 0.125, 0.5

    def f(lhs, rhs):
        return contract(lhs, rhs, DENSE, factors=factors, config=config, multiplier=multiplier)

    def looped(lhs, rhs):
        return jnp.stack([f(x, rhs) for x in lhs])

    def scanned(lhs, rhs):
        return jax.lax.scan(lambda c, x: (c, f(x, rhs)), 0, lhs)[1]

    def pull(f, lhs, rhs, dy):
        y, vjp = jax.vjp(f, lhs, rhs)
        return y, *vjp(dy)

    forms = looped, jax.vmap(f, (0, None)), scanned, jax.checkpoint(looped)
    found = jit(lambda *args: [pull(f, *args) for f in forms])(*operands)
    a, b, ct = (np.clip(x, -448, 448).astype(E4M3) if config else x for x in operands)

    def products(*operands):
        a, b, ct = (np.float64(x) for x in operands)
        return a @ b, ct @ b.T, np.einsum("abk,abn->kn", a, ct)

    wanted, sizes = products(a, b, ct), products(abs(a), abs(b), abs(ct))
    for results in found:  # float32 sums of at most 8 terms
        for got, value, size, factor in zip(results, wanted, sizes, factors, strict=True):
            assert np.all(abs(got / (multiplier * factor) - value) <= 10 * 2.0**-24 * size)


def test_switches_of_the_weight_gradient() -> None:
    """The Hadamard matrix cancels; a wide weight gradient is that of the operands themselves."""
    spec, *shapes = LAYOUTS["dense"]
    lhs, rhs = (RNG.standard_normal((4, 48, 8), np.float32), draw(1, shapes[1], 1.0))
    dy = RNG.standard_normal((4, 48, 6)).astype(np.float32)
    exact, narrow, rotated = (
        MatmulConfig(lhs=f, rhs=f, cotangent=f, strategy=Block(16), hadamard=h)
        for f, h in (("float32", True), (E2M1, False), (E2M1, True))
    )
    wide = [
        MatmulConfig(strategy=strategy, wide_weight_gradient=True)
        for strategy in (Unit(), Dynamic(), Dynamic("channel"), Delayed(), Block(4))
    ]
    configs = [exact, narrow, rotated, *wide]
    run = jit(lambda *a: [three_products(c, spec)(*a, state_of(c.strategy)) for c in configs])
    expected = np.einsum("btk,btn->kn", np.float64(lhs), np.float64(dy))
    found = run(lhs, rhs, dy)
    errors = [np.linalg.norm(drhs - expected) / np.linalg.norm(expected) for _, _, drhs, _ in found]
    assert max(errors[0], *errors[3:]) < 1e-6
    assert 0.05 < errors[2] < 0.2
    assert errors[1] != errors[2]
    empty = jax.eval_shape(three_products(rotated, DENSE), LHS[:0], RHS, LHS[:0, :4], None)
    assert [x.shape for x in empty[:3]] == [(0, 4), (0, 8), (8, 4)]
    own = [three_products(dataclasses.replace(c, wide_weight_gradient=False), spec) for c in wide]
    same = jit(lambda *a: [f(*a, state_of(c.strategy)) for f, c in zip(own, wide, strict=True)])
    for (y, dlhs, _, seen), (*kept, _, amax) in zip(found[3:], same(lhs, rhs, dy), strict=True):
        jax.tree.map(np.testing.assert_array_equal, (y, dlhs, seen), (*kept, amax))


def test_dithered_cotangents_keep_their_mean() -> None:
    """Use numbers that would all be rounded down to nearest."""
    wide = MatmulConfig(lhs="float32", rhs="float32")
    ones = jnp.ones((4096, 1))

    def mean(config: MatmulConfig | None, cotangent: jax.Array) -> jax.Array:
        f = lambda w: contract(ones, w, DENSE, config=config)  # noqa: E731
        return jax.vjp(f, jnp.ones((1, 1)))[1](cotangent)[0][0, 0] / 4096

    for dtype, start in ((E4M3, 1.0), (E5M2, 1.0), ("E2M1", 1.0), ("E2M1", 0.5), (E4M3, 2.0**-8)):
        fmt = format_of(dtype)
        step = max(start * fmt.eps, fmt.smallest_subnormal)
        nearest = dataclasses.replace(wide, cotangent=dtype)
        configs = None, nearest, dataclasses.replace(nearest, dither=True)
        cotangent = jnp.linspace(start, start + step / 2, 4096)[:, None]
        run = jax.jit(lambda ct, cs=configs: [mean(c, ct) for c in cs])
        exact, down, dithered = map(float, run(cotangent))
        assert down == pytest.approx(start, abs=step / 100)
        assert dithered == pytest.approx(exact, abs=step / 50)
    # The largest float16 saturates, though rounded up it is beyond float16.
    config, one = dataclasses.replace(wide, dither=True), jnp.ones((1, 1), jnp.float16)
    _, vjp = jax.vjp(lambda x: contract(x, one, DENSE, config=config), one)
    assert vjp(jnp.full((1, 1), 65472, jnp.float16))[0].item() == 448


def test_fp8_has_one_derivative() -> None:
    """A second derivative, which would be 0 or NaN, is refused."""
    x, w = (RNG.standard_normal((32, 32), np.float32) for _ in range(2))

    def penalty(config: MatmulConfig, w: Any) -> Any:
        """Penalize the gradient by the input, as WGAN-GP does."""
        f = lambda x: jnp.sum(jnp.tanh(contract(x, w, DENSE, config=config)))  # noqa: E731
        return jnp.sum(jax.grad(f)(x) ** 2)

    for wrap, strategy in ((jax.jit, Unit()), (jax.jit, Dynamic()), (jax.checkpoint, Block())):
        f = wrap(partial(penalty, MatmulConfig(strategy=strategy)))
        jax.eval_shape(f, w)
        with pytest.raises(TypeError, match=r"no second derivative.*policy='bfloat16'"):
            jax.eval_shape(jax.grad(f), w)
    wide = [MatmulConfig(lhs=n, rhs=n, cotangent=n) for n in ("bfloat16", "float32")]
    found, expected = jit(lambda w: [jax.grad(penalty, 1)(c, w) for c in wide])(w)
    assert float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)) < 0.05


# Chunks of the left operand.

FACTORS = (0.5, 0.25, 2.0)


def test_chunks_are_the_whole() -> None:
    strategies = [None, Dynamic("channel"), Delayed(), Block(4)]
    x, w, dy = (jnp.asarray(RNG.normal(size=s), jnp.float32) for s in [(6, 8), (8, 5), (6, 5)])

    def both(strategy, state, x, w, dy):
        config = None if strategy is None else MatmulConfig(strategy=strategy)
        times = Multiplier(w, DENSE, FACTORS, config, jnp.float32, 2, state)
        found = []
        for rows in (slice(0, 2), slice(2, 6)):
            y, part = times(x[rows])
            found.append((y, *times.gradients(part, dy[rows])))
        y, dx, dw, seen = zip(*found, strict=True)
        total = jax.tree.map(lambda *a: sum(a), times.shared_gradient, *seen)
        chunks = jnp.concatenate(y), jnp.concatenate(dx), sum(dw), total
        return chunks, three_products(config, DENSE)(x, w, dy, state)

    states = [strategy and state_of(strategy) for strategy in strategies]
    cases = list(zip(strategies, states, strict=True))
    for (*found, seen), (*expected, whole) in jit(lambda *a: [both(*c, *a) for c in cases])(
        x, w, dy
    ):
        for got, wanted, factor in zip(found, expected, FACTORS, strict=True):
            np.testing.assert_allclose(got, wanted * factor, rtol=1e-6, atol=1e-6)
        if seen is not None:
            state = states[strategies.index(Delayed())]
            ours, theirs = state.advance(seen), state.advance(whole)
            np.testing.assert_array_equal(ours.history, theirs.history)
            np.testing.assert_array_equal(ours.counts, theirs.counts)


def test_chunks_quantize_the_right_operand_once_and_its_gradient_is_wide() -> None:
    def times(w, parts, **options):
        return Multiplier(w, DENSE, FACTORS, MatmulConfig(), jnp.bfloat16, parts, **options)

    def gradients(w, x):
        y, part = (whole := times(w, 3))(x)
        assert is_scaled(part[0])
        dx, dw, seen = whole.gradients(part, y)
        assert seen is whole.shared_gradient is None
        return y, dx, dw, times(w, 1).gradients(part, y)[1]

    x, w = jnp.ones((2, 8), jnp.bfloat16), jnp.ones((8, 5), jnp.bfloat16)
    dtypes = [a.dtype.name for a in jax.eval_shape(gradients, w, x)]
    assert dtypes == ["bfloat16", "bfloat16", "float32", "bfloat16"]
    casts = jax.make_jaxpr(lambda xs, w: [y for y, _ in map(times(w, 3), xs)])
    assert sorted(conversions(casts([x] * 3, w), E4M3)) == [*3 * [(2, 8)], (8, 5)]
    # It is transposed for cuBLAS once, outside of the loop over chunks.
    forward = [jax.make_jaxpr(lambda w, n=n: times(w, n)(x)[0])(w) for n in (3, 1)]
    counts = [[e.primitive.name for e in equations(j)].count("transpose") for j in forward]
    assert counts == [1, 0]
    jaxpr = jax.make_jaxpr(lambda x: times(w, 1, forward="bfloat16")(x)[0])(x)
    dots = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert [v.aval.dtype.name for v in dots[0].invars] == ["bfloat16"] * 2


# Meshes.


def test_the_right_operand_of_chunks_is_gathered() -> None:
    mesh, x, w = mesh_of(fsdp=4), jnp.ones((4, 8)), jnp.arange(32.0).reshape(8, 4) / 32

    def run(x: Any, w: Any) -> Any:
        places = {"k": (), "n": ()}
        return Multiplier(w, DENSE, FACTORS, MatmulConfig(), jnp.float32, 1, places=places)(x)[0]

    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, P("fsdp"))
        args = [jax.device_put(a, place) for a in (x, w)]
        program = jax.jit(run).lower(*args).compile()
    np.testing.assert_allclose(program(*args), run(x, w), rtol=1e-6)
    assert {c.kind for c in collectives(program)} == {"all-gather"}


@pytest.mark.parametrize(
    "strategies",
    [[None, Dynamic("channel")], pytest.param([Unit(), Block(8)], marks=pytest.mark.slow)],
)
def test_explicit_axes(strategies: list[Any]) -> None:
    """Results equal those of one device, and are sharded like the operands."""
    mesh, spec = explicit_mesh(data=2, model=2), LAYOUTS["dense"][0]
    configs = [strategy and MatmulConfig(strategy=strategy) for strategy in strategies]
    values = [RNG.standard_normal(s, np.float32) for s in ((4, 2, 16), (16, 8))]

    @jit
    def run(x: Any, w: Any) -> Any:
        def loss(x: Any, w: Any, config: MatmulConfig | None) -> Any:
            y = contract(x, w, spec, config=config, out_dtype=jnp.float32)
            return jnp.sum(jnp.sin(y)), y

        return [jax.grad(loss, (0, 1), has_aux=True)(x, w, config) for config in configs]

    expected = run(*values)
    # The sum is over devices, or one mesh axis shards two dimensions of the result.
    for places in ((P("data", None, "model"), P("model")), (P(("data", "model")), P("data"))):
        with jax.set_mesh(mesh):
            operands = [jax.device_put(*pair) for pair in zip(values, places, strict=True)]
            found = run(*operands)
            for config, got, wanted in zip(configs, found, expected, strict=True):
                assert jax.typeof(got[1]).sharding.spec == P(places[0][0], None, None), config
                for gradient, operand in zip(got[0], operands, strict=True):
                    assert jax.typeof(gradient).sharding == jax.typeof(operand).sharding, config
                for a, e in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
                    size = float(np.max(np.abs(e)))
                    np.testing.assert_allclose(a, e, rtol=0, atol=1e-4 * size)
