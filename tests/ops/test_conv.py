"""Convolution and pooling, channels last."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from tests.batching import compute, entry
from unitscale import ops, rules
from unitscale.quant import MatmulConfig

from .conformance import (
    case,
    check_all,
    in_every_dtype,
    linear,
    normal,
    pulled,
    rounded,
    scaled,
    under_scales,
)


def sides(padding, size, reach, strides):
    """Return padding as pairs; `reach` is the dilated window size minus one."""
    if padding == "SAME":
        total = np.maximum((-(-size // strides) - 1) * strides + reach + 1 - size, 0)
        return [(t // 2, t - t // 2) for t in total]
    if padding in ("CIRCULAR", "REFLECT"):
        return [(r // 2, r - r // 2) for r in reach]
    return {"VALID": [(0, 0)] * len(size), "CAUSAL": [(r, 0) for r in reach]}.get(padding, padding)


def conv(x, kernel, bias=0.0, *, strides=1, padding="SAME", dilation=1, input_dilation=1, groups=1):
    """Convolve with one matmul per tap of the kernel and group."""
    *window, fan, out = kernel.shape
    rank = len(window)
    gaps = np.broadcast_to(input_dilation, rank)
    apart = np.zeros((len(x), *(1 + (np.array(x.shape[1:-1]) - 1) * gaps), x.shape[-1]))
    apart[(slice(None), *(slice(None, None, gap) for gap in gaps))] = x
    strides, dilation = np.broadcast_to(strides, rank), np.broadcast_to(dilation, rank)
    reach = (np.array(window) - 1) * dilation
    pads = sides(padding, np.array(apart.shape[1:-1]), reach, strides)
    mode = {"CIRCULAR": "wrap", "REFLECT": "reflect"}.get(padding, "constant")
    x = np.pad(apart, [(0, 0), *pads, (0, 0)], mode)
    shape = (np.array(x.shape[1:-1]) - reach - 1) // strides + 1
    y = np.zeros((x.shape[0], *shape, out))
    for tap in np.ndindex(*window):
        start = np.array(tap) * dilation
        ranges = zip(start, start + (shape - 1) * strides + 1, strides, strict=True)
        picked = x[(slice(None), *(slice(*r) for r in ranges))]
        for g in range(groups):
            i, o = slice(g * fan, (g + 1) * fan), slice(g * out // groups, (g + 1) * out // groups)
            y[..., o] += picked[..., i] @ kernel[tap][..., o]
    return y + bias


CONVS = {
    # x, kernel, options
    "1d": ((2, 5, 3), (3, 3, 4), {}),
    "1d causal dilated": ((1, 6, 2), (3, 2, 3), {"padding": "CAUSAL", "dilation": 2}),
    "1d circular dilated": ((2, 5, 2), (4, 2, 3), {"padding": "CIRCULAR", "dilation": 2}),
    "2d reflected": ((1, 3, 4, 2), (3, 2, 2, 3), {"padding": "REFLECT", "strides": (2, 1)}),
    "2d all": (
        (1, 4, 5, 4),
        (2, 2, 2, 4),
        {"strides": (2, 1), "dilation": (1, 2), "groups": 2, "padding": "VALID"},
    ),
    "3d": ((1, 2, 3, 2, 2), (2, 1, 2, 2, 2), {}),
    "2d of zeros between": (
        (1, 3, 4, 4),
        (2, 3, 2, 4),
        {"input_dilation": (2, 3), "padding": "VALID", "strides": (1, 2), "groups": 2},
    ),
    "2d transposed": (
        (1, 3, 4, 2),
        (2, 3, 2, 3),
        {"transposed": (2, 1), "padding": ((1, 0), (2, 2)), "dilation": (1, 2)},
    ),
}


def arguments(name: str):
    """Return op, reference, and the roots of the numbers of terms in the three sums."""
    x, kernel, options = CONVS[name]
    given = {"feature_group_count" if k == "groups" else k: v for k, v in options.items()}
    options, op = dict(options), ops.conv
    if "transposed" in options:
        op = ops.conv_transpose
        options["input_dilation"] = given["strides"] = given.pop("transposed")
        del options["transposed"]
    y = conv(np.zeros(x), np.zeros(kernel), **options)
    strides, gaps = (
        np.prod(np.broadcast_to(options.get(name, 1), len(x) - 2))
        for name in ("strides", "input_dilation")
    )
    window = np.prod(kernel[:-2])
    dx = window * kernel[-1] / options.get("groups", 1) / strides
    terms = window * kernel[-2] / gaps, dx, np.prod(y.shape[:-1]) / gaps
    both = functools.partial(op, **given), functools.partial(conv, **options)
    return *both, *(n**-0.5 for n in terms)


def test_conv() -> None:
    cases = {}
    for name in CONVS:
        op, reference, fwd, dx, weight = arguments(name)
        args = normal(name, *CONVS[name][:2])
        free = functools.partial(op, constraint=None)
        cases[name] = linear(free, reference, args, fwd=fwd, bwd=(dx, weight))
        if name == "1d causal dilated":
            for how, shared in (("to_grad_input_scale", dx), ("gmean", (fwd * dx) ** 0.5)):
                given = functools.partial(op, constraint=how)
                cases[how] = linear(given, reference, args, fwd=shared, bwd=(shared, weight))
    check_all(cases)


def test_a_transposed_convolution_is_that_of_jax() -> None:
    def both(strides, padding, x, kernel):
        dims = ("NHC", "HIO", "NHC")
        expected = jax.lax.conv_transpose(x, kernel, (strides,), padding, dimension_numbers=dims)
        return ops.conv_transpose(x, kernel, strides=strides, padding=padding).data, expected

    table = {}
    for window, strides, padding in itertools.product((1, 2, 3, 5), (1, 2, 3), ("SAME", "VALID")):
        args = (np.float32(a) for a in normal("transposed", (1, 4, 2), (window, 2, 3)))
        table[window, strides, padding] = functools.partial(both, strides, padding), *args
    for (window, strides, padding), (found, expected) in compute(table).items():
        fwd = rules.conv((window, 2, 3), 1, 1, input_dilation=strides).fwd
        with entry((window, strides, padding)):
            np.testing.assert_allclose(found, fwd * np.asarray(expected), rtol=1e-5, atol=1e-6)


POOLS = {"avg": (ops.avg_pool, rules.avg_pool), "max": (ops.max_pool, rules.max_pool)}


def pool(x, window, strides=None, padding="VALID", count_include_pad=True, *, f):
    """Pool window by window."""
    rank = len(window)
    strides = np.array(strides or (1,) * rank)
    pads = sides(padding, np.array(x.shape[-1 - rank : -1]), np.array(window) - 1, strides)
    x = np.pad(x, [(0, 0)] * (x.ndim - 1 - rank) + [*pads, (0, 0)], constant_values=np.nan)
    shape = (np.array(x.shape[-1 - rank : -1]) - window) // strides + 1
    y = np.zeros((*x.shape[: -1 - rank], *shape, x.shape[-1]))
    axes = tuple(range(-1 - rank, -1))
    for position in np.ndindex(*shape):
        starts = np.array(position) * strides
        part = x[(..., *map(slice, starts, starts + window), slice(None))]
        total = np.nanmax(part, axes) if f == "max" else np.nansum(part, axes) / np.prod(window)
        y[(..., *position, slice(None))] = (
            np.nanmean(part, axes) if f == "avg" and not count_include_pad else total
        )
    return y


def pools(f: str, shape, *arguments, **options):
    """Make a check of a pool with the factors of its rule."""
    op, rule = POOLS[f]
    factors = rule(*arguments[:2], **options)
    return case(
        lambda x: op(x, *arguments, **options),
        lambda x: pool(x, *arguments, f=f),
        normal("pool", shape),
        fwd=factors.fwd,
        bwd=factors.bwd,
        step=1e-5 if f == "max" else 1.0,
    )


POOLED = [
    ((1, 3, 5, 2), (2, 3), (2, 1), "SAME"),
    ((2, 3, 4, 1), (2, 2), (1, 2), ((1, 0), (1, 1))),
    ((2, 1, 4, 3, 2), (2, 3)),
    ((1, 2, 3, 2, 2), (2, 1, 2)),
]


def test_pool() -> None:
    cases = {(f, i): pools(f, *p, constraint=None) for f in POOLS for i, p in enumerate(POOLED)}
    for padding in ("SAME", ((1, 1), (0, 2))):
        cases[padding] = pools("avg", (2, 3, 5, 2), (2, 3), (1, 2), padding, False)
    check_all(cases)


_, _, FWD, _, WEIGHT = arguments("1d")
# By default the gradient of x is exactly the true one.
ONE = linear(ops.conv, conv, normal("1d", *CONVS["1d"][:2]), fwd=FWD, bwd=(FWD, WEIGHT))
SAME = {f: pools(f, (2, 3, 4, 2), (2, 2), (2, 1), "SAME") for f in POOLS}
test_in_every_dtype = in_every_dtype({"1d": ONE, **SAME}, mapped=("1d", "avg", "max"))
BIASED = linear(
    ops.conv,
    lambda x, kernel, bias: conv(x, kernel, bias / FWD),
    normal("scales", *CONVS["1d"][:2], (4,)),
    fwd=FWD,
    bwd=(FWD, WEIGHT, WEIGHT * FWD),
)
SCALED = [
    (np.float32([[[2]], [[8]]]), 2.0, 1),  # one per example
    (np.float32([1, 4, 0.5]), None, 4.0),  # one per input channel
    (None, np.float32([1, 4, 0.5, 2]), 2.0),  # one per output channel
]
test_scales_and_bias = under_scales(SCALED, {"1d": BIASED})
SCALED = [
    np.float32([[[[2]]], [[[8]]]]),  # one per example
    np.float32([1, 4, 0.5]),  # one per channel
    np.float32([[[1], [4], [0.5], [2]]]),  # varies within windows
]
POOL_SCALES = {f: pools(f, (2, 3, 4, 3), (2, 2)) for f in POOLS}
test_scales_of_pools = under_scales([(s,) for s in SCALED], POOL_SCALES)


def test_integers_as_padding_and_steps() -> None:
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((1, 5, 6, 2), (3, 3, 2, 4))]
    programs = {}
    for name, how in {
        **{padding: {"padding": padding} for padding in (1, (1, 1), (1, (1, 1)), ((1, 1), (1, 1)))},
        "default": {},
        "ones": {"strides": 1},
    }.items():
        conv_of, transposed = (functools.partial(f, **how) for f in (ops.conv, ops.conv_transpose))
        pool_of = functools.partial(ops.max_pool, window_shape=(2, 2), **how)
        run = lambda x, k: (conv_of(x, k), transposed(x, k), pool_of(x))  # noqa: B023, E731
        programs[name] = str(jax.make_jaxpr(run)(*args))
    by_padding = list(programs.values())[:4]
    assert by_padding == [by_padding[0]] * 4
    assert programs["default"] == programs["ones"]


def test_bfloat16_stays_bfloat16() -> None:
    """Operands of all three convolutions are bfloat16, and sums float32."""
    args = scaled(
        normal("bfloat16", (2, 6, 64), (3, 64, 32), (2, 6, 32)), (None,) * 3, jnp.bfloat16
    )

    def pull(x, w, ct):
        y, vjp = jax.vjp(lambda x, w: ops.conv(x, w).data, x, w)
        return y, *vjp(ct)

    text = jax.jit(pull).lower(*args).as_text()
    products = [line for line in text.splitlines() if "stablehlo.convolution" in line]
    assert len(products) == 3
    assert not any("f32>" in line.rpartition(" : ")[2] for line in products)
    wide = jax.jit(pull)(*(a.astype(jnp.float32) for a in args))
    for found, expected in zip(jax.jit(pull)(*args), wide, strict=True):
        # Half an eps for the result, another half for its product with the factor.
        np.testing.assert_allclose(np.float32(found), expected, rtol=2**-7, atol=1e-6)


def test_quantized() -> None:
    x, w, ct = normal("fp8", (1, 6, 4), (3, 4, 2), (1, 6, 2))
    x[0, 0, 0] = 500.0  # saturates
    op = functools.partial(ops.conv, config=MatmulConfig())
    y, (_, dw) = pulled(op, *(np.float32(a) for a in (x, w)), cotangent=np.float32(ct))
    x[0, 0, 0] = 448.0
    qx, qw = rounded(np.float32(x), "float8_e4m3fn"), rounded(np.float32(w), "float8_e4m3fn")
    np.testing.assert_allclose(y, 12**-0.5 * conv(qx, qw), rtol=1e-5, atol=1e-4)
    # Cotangents are not quantized: dkernel is the exact product with the quantized input.
    padded = np.pad(qx, [(0, 0), (1, 1), (0, 0)])
    expected = np.stack([padded[0, t : t + 6].T @ ct[0] for t in range(3)])
    np.testing.assert_allclose(dw, 6**-0.5 * expected, rtol=1e-5, atol=1e-3)


def test_maxima_of_nan_and_of_equal_entries() -> None:
    x, ones = np.float32([[np.nan], [1.0], [2.0], [np.inf]]), np.ones((2, 1), np.float32)
    free = functools.partial(ops.max_pool, window_shape=(2,), constraint=None)
    largest, mean, (_, (grad,)) = compute(
        {
            "max": (lambda x: ops.max_pool(x, (2,)).data, x),
            "mean": (lambda x: ops.avg_pool(x, (2,)).data, x),
            "equal": (functools.partial(pulled, free), ones),
        }
    ).values()
    np.testing.assert_array_equal(np.isnan(largest.ravel()), [True, False, False])
    assert np.isposinf(mean[-1, 0])
    np.testing.assert_array_equal(grad.ravel(), [1, 0])
