"""Norms: layer, RMS, group and batch norm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.batching import compute
from tests.products import equations
from unitscale import grad, ops
from unitscale.core import ScaledArray

from .conformance import case, in_every_dtype, normal, pulled, scaled, under_scales, values

WEIGHT = 6**-0.5  # of six rows


def norm_over(axes, groups=None, centered=True):
    """Normalize by the formula; split the last axis into groups before averaging over `axes`."""

    def reference(x, gain=1.0, bias=0.0, eps=1e-6):
        z = x if groups is None else x.reshape(*x.shape[:-1], groups, -1)
        z = z - z.mean(axes, keepdims=True) if centered else z
        y = z / np.sqrt((z * z).mean(axes, keepdims=True) + eps)
        return y.reshape(x.shape) * gain + bias

    return reference


STATISTICS = tuple(np.float32([[0.5, -1, 2, 0], [0.25, 1, 4, 2]]))


def standardize(x, gain=1.0, bias=0.0, eps=1e-6):
    mean, var = STATISTICS
    return (x - mean) / np.sqrt(var + eps) * gain + bias


GROUP = functools.partial(ops.group_norm, num_groups=2)
NORMS = {
    "layer_norm": (ops.layer_norm, norm_over(-1)),
    "rms_norm": (ops.rms_norm, norm_over(-1, centered=False)),
    "group_norm": (GROUP, norm_over((1, 3), 2)),
    "batch_norm": (ops.batch_norm, norm_over((0, 1))),
    "statistics": (functools.partial(ops.batch_norm, statistics=STATISTICS), standardize),
}


def cases(counts, **options):
    return {
        f"{name}, {count}": case(
            functools.partial(op, **{"eps": 1e-6, **options}),
            functools.partial(reference, **options),
            normal(name, *((2, 3, 4), (4,), (4,))[:count]),
            fwd=1.0,
            bwd=(1.0, WEIGHT, WEIGHT)[:count],
            slack=2,
        )
        for name, (op, reference) in NORMS.items()
        for count in counts
        if count < 3 or name != "rms_norm"
    }


test_value_and_gradients = in_every_dtype(
    cases((1, 3)) | {"gain": cases((2,))["rms_norm, 2"]},
    mapped=("layer_norm, 3", "rms_norm, 1", "batch_norm, 1"),
    wide=("layer_norm, 1", "group_norm, 1", "batch_norm, 1", "statistics, 1"),
)
SCALED = [
    (2.0**-12, 4.0, 8.0),
    (np.float32([[[1], [2], [64]]]), 0.25, None),  # one per row
    (np.float32([1, 2, 4, 2**-10]), np.float32([1, 2, 3, 4]), 2.0),  # one per feature
]
test_scales = under_scales(SCALED, cases((3,), eps=1e-3), slack=4)


def test_the_scale_is_dropped() -> None:
    x = ScaledArray(np.float32(normal("x", (3, 4))[0]), 2.0**40)
    y = jax.jit(ops.rms_norm)(x)
    assert y.scale is None
    # Its square is beyond float32 where the value is normalized, and not where the data is.
    np.testing.assert_allclose(y.data, NORMS["rms_norm"][1](x.data), rtol=1e-5)


def test_eps_over_a_tiny_scale_is_not_infinite() -> None:
    """For values far below eps, y = x / eps^1/2."""
    data = np.float32([[3.0, 4.0]])
    for scale in (2.0**-120, 2.0**-80):
        y, (dx,) = pulled(lambda d, s=scale: ops.rms_norm(ScaledArray(d, s), eps=1e-6), data)
        np.testing.assert_allclose(np.float64(y), np.float64(data) * scale * 1e3, rtol=1e-6)
        np.testing.assert_allclose(dx, scale * 1e3, rtol=1e-6)


def test_zeros_have_finite_gradients_and_an_empty_batch_a_shape() -> None:
    zeros, table = np.zeros((2, 4), np.float32), {}
    for op, *shape in ((ops.batch_norm, 0, 4), (GROUP, 0, 3, 4), (ops.layer_norm, 0, 4)):
        assert jax.eval_shape(op, np.zeros(shape, np.float32)).shape == tuple(shape)
        for scale in (None, 0.0, 2.0**100):
            x = zeros if scale is None else ScaledArray(zeros, np.full(1, scale, np.float32))
            table[op, scale] = functools.partial(pulled, op), x
    for y, (dx,) in compute(table).values():
        np.testing.assert_array_equal(y, 0)
        assert np.isfinite(getattr(dx, "data", dx)).all()


def test_the_gradient_at_zero_is_that_of_the_value() -> None:
    """The gradient at zero is (I - 1 / n) / eps^1/2, whatever the scale."""
    x, scales = jnp.zeros(4), jnp.float32([2.0**-40, 2.0**40, 2.0**100])
    for op, centered in ((ops.layer_norm, 1.0), (ops.rms_norm, 0.0)):
        of_value = grad(lambda x, op=op: op(x, eps=2.0**-18).data[0])
        found = jax.jit(jax.vmap(lambda s, f=of_value: f(ScaledArray(x, s))))(scales)
        expected = 512 * (np.eye(4)[0] - centered / 4)
        np.testing.assert_allclose(found, [expected] * 3, rtol=1e-6)


def test_float16_and_float64() -> None:
    x, rows = np.float16([[60000, -60000], [6e-8, 0]]), np.ones((2000, 4), np.float16)
    y, (_, (dgain,)) = compute(
        {
            "large": (lambda x: ops.rms_norm(x, eps=0.0).data, x),
            "gain": (
                lambda *a: pulled(functools.partial(ops.rms_norm, a[0]), a[1], cotangent=100.0),
                rows,
                rows[0],
            ),
        }
    ).values()
    np.testing.assert_allclose(np.float64(y), [[1, -1], [2**0.5, 0]], rtol=2**-11)
    # The gradient of a gain sums 2000 cotangents of 100 > 65504 before the factor 2000^-1/2.
    np.testing.assert_allclose(np.float64(dgain), 2e5 * 2000**-0.5, rtol=2**-10)
    with jax.enable_x64(True):
        found = jax.jit(ops.rms_norm)(ScaledArray(np.array([2.0**-20]), np.float32(2.0**12))).data
    expected = NORMS["rms_norm"][1](np.asarray([2.0**-8]))
    np.testing.assert_allclose(found, expected, rtol=1e-15)


def test_large_means_do_not_cancel() -> None:
    """Test a row far from zero, and a constant row."""
    x = np.float32([[1000.5, 1001.5, 999.0, 1003.0], [3.0] * 4])
    (dy,) = normal("large", x.shape)
    y, (dx,) = pulled(functools.partial(ops.layer_norm, eps=0.5), x, cotangent=np.float32(dy))
    with jax.enable_x64(True):
        z = jnp.float64(x)
        f = lambda z: (z - z.mean(-1, keepdims=True)) / jnp.sqrt(z.var(-1, keepdims=True) + 0.5)  # noqa: E731
        expected, (wanted,) = pulled(f, z, cotangent=np.float64(np.float32(dy)))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dx, wanted, rtol=1e-4, atol=2e-5)


def test_batch_statistics_are_those_of_the_value() -> None:
    (data,) = normal("statistics", (2, 3, 4))
    scales = {
        "none": None,
        "features": np.float32([1, 2, 4, 8]),
        "rows": np.float32([[[1], [2], [9]]]),
    }

    def both(x):
        found = ops.batch_statistics(x)
        return found, ops.batch_norm(x, statistics=found).value, ops.batch_norm(x).value

    table = {name: (both, *scaled([data], [scale])) for name, scale in scales.items()}
    for name, (found, given, own) in compute(table).items():
        (value,) = values([data], [scales[name]])
        for got, want in zip(found, (value.mean((0, 1)), value.var((0, 1))), strict=True):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(given, own, rtol=1e-4, atol=1e-5)


def test_statistics_are_computed_once_and_kept() -> None:
    """The backward pass computes no root; it gets the mean and inverse deviation of each row."""
    x, ones = np.ones((6, 8), jnp.bfloat16), np.ones(8, np.float16)
    pull = lambda *args: jax.vjp(lambda *args: ops.layer_norm(*args).data, *args)  # noqa: E731
    y, vjp = jax.eval_shape(pull, x, ones, ones)
    kept = sorted((leaf.dtype.name, leaf.size) for leaf in jax.tree.leaves(vjp))
    assert kept == [("bfloat16", 48), *[("float16", 8)] * 2, *[("float32", 6)] * 2]
    assert "rsqrt" not in str(jax.make_jaxpr(lambda vjp, y: vjp(y))(vjp, y))
    # One pass over a row gives both moments, of which the second is cut off at 0.
    names = [e.primitive.name for e in equations(jax.make_jaxpr(ops.layer_norm)(x).jaxpr)]
    assert (names.count("reduce_sum"), names.count("max")) == (2, 1)


def test_a_second_derivative_knows_the_statistics_too() -> None:
    x, dy = (np.float32(a) for a in normal("second", (3, 8), (3, 8)))

    def plain(x):
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 0.5)

    def twice(f):
        first = jax.grad(lambda x: jnp.vdot(f(x), dy))
        return jax.jit(jax.grad(lambda x: jnp.vdot(first(x), dy)))(x)

    found = twice(lambda x: ops.layer_norm(x, eps=0.5).data)
    np.testing.assert_allclose(found, twice(plain), rtol=1e-4, atol=1e-4)
