"""Products along any axes: those of dense after a transposition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.refusals import refuses
from unitscale import ops
from unitscale.core import ScaledArray
from unitscale.quant import MatmulConfig

from .conformance import assert_unit, in_every_dtype, linear, normal

# subscripts, x, kernel, bias; features in, out, rows
PRODUCTS = {
    "dense": ("...a,ab->...b", (2, 3, 5), (5, 4), (4,), 5, 4, 6),
    "heads": ("btd,dhk->bthk", (2, 3, 5), (5, 2, 4), (2, 4), 5, 8, 6),
    "merge": ("bthk,hkd->btd", (2, 3, 2, 4), (2, 4, 5), (5,), 8, 5, 6),
    "turned": ("nta,hab->nthb", (2, 3, 5), (2, 5, 4), (2, 4), 5, 8, 6),
    "experts": ("ebi,eio->ebo", (2, 3, 5), (2, 5, 4), (2, 4), 5, 4, 3),
}


def case(name: str, count: int):
    subscripts, x, kernel, bias, n_in, _, rows = PRODUCTS[name]
    out = subscripts.partition("->")[2].replace("...", "xy")
    own = [c in subscripts.partition(",")[2].partition("->")[0] for c in out]

    def reference(x, w, b=None):
        y = np.einsum(subscripts, x, w)
        if b is None:
            return y
        # The bias divided by the factor that `check` multiplies it with.
        spread = b.reshape([n if o else 1 for n, o in zip(y.shape, own, strict=True)])
        return y + spread * n_in**0.5

    def op(*args):
        return ops.einsum(subscripts, *args)

    bwd = (n_in**-0.5, rows**-0.5, (rows * n_in) ** -0.5)[:count]
    args = normal(name, x, kernel, bias)[:count]
    return linear(op, reference, args, fwd=n_in**-0.5, bwd=bwd, slack=2)


CASES = {name: case(name, 2) for name in PRODUCTS} | {
    f"{name} bias": case(name, 3) for name in ("heads", "experts")
}
test_value_and_gradients = in_every_dtype(CASES)


@pytest.mark.parametrize("scales", [(2.0**6, 0.25, 2.0), (np.float32([1, 2, 4, 8, 16]), 2.0, None)])
def test_values_under_scales(scales) -> None:
    subscripts, *shapes = PRODUCTS["heads"][:4]
    args = normal("scales", *shapes)
    operands = [
        ScaledArray(jnp.asarray(a, jnp.float32), s) for a, s in zip(args, scales, strict=True)
    ]
    x, w, b = (a if s is None else a * s for a, s in zip(args, scales, strict=True))
    expected = np.einsum(subscripts, x, w) * 5**-0.5 + b
    np.testing.assert_allclose(
        ops.einsum(subscripts, *operands).value, expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_the_kernel_alone_brings_is_what_the_input_gradient_sums(name) -> None:
    subscripts, x, kernel, _, n_in, n_out, _ = PRODUCTS[name]
    x, kernel = (jnp.asarray(a, jnp.float32) for a in normal(name, x, kernel))

    def gradient(constraint):
        return jax.grad(
            lambda x: jnp.sum(ops.einsum(subscripts, x, kernel, constraint=constraint).value)
        )(x)

    free, bound = gradient(None), gradient("to_output_scale")
    np.testing.assert_allclose(free, bound * (n_in / n_out) ** 0.5, rtol=1e-5, atol=1e-5)


def test_unit() -> None:
    def op(x, w, b):
        return ops.einsum("btd,dhk->bthk", x, w, b - jax.lax.stop_gradient(b))

    assert_unit(op, (4, 16, 64), (64, 8, 8), (8, 8))


def test_formats_are_those_of_dense() -> None:
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in normal("fp8", (2, 3, 16), (16, 2, 8)))
    config = MatmulConfig()
    found = ops.einsum("btd,dhk->bthk", x, w, config=config)
    expected = ops.dense(x, w.reshape(16, 16), config=config).reshape(2, 3, 2, 8)
    np.testing.assert_array_equal(found.data, expected.data)


x, w = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
test_errors = refuses(
    [
        (
            ValueError,
            lambda: ops.einsum("abc,cd", x, w),
            r"ops\.einsum: subscripts must be .*no ->",
        ),
        (ValueError, lambda: ops.einsum("abc,cd->ad", x, w), "'b' in one term only"),
        (ValueError, lambda: ops.einsum("ab,bc->ac", x, w), "axes of 'ab,bc->ac'.*x .2, 3, 4"),
        (ValueError, lambda: ops.einsum("abc,bd->acd", x, w), "must have the axes of"),
        (ValueError, lambda: ops.einsum("abc,cd->abd", x, w, x[0]), r"bias must be \(5,\)"),
        (TypeError, lambda: ops.einsum("abc,cd->abd", x, w > 0), "kernel must be a floating"),
    ]
)


@pytest.mark.parametrize("shapes", [((3, 4, 6), (4, 5)), ((3, 4), (4, 5, 6)), ((3, 4), (3, 5))])
def test_axes_that_are_not_those_of_the_equation(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="must have the axes of 'ab,bc->ac'"):
        ops.einsum("ab,bc->ac", *map(jnp.ones, shapes))


def test_a_kernel_that_brings_no_axis_is_a_column() -> None:
    x, w = (jnp.asarray(a, jnp.float32) for a in normal("column", (6, 4), (4,)))

    def gradients(f):
        return jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1))(x, w)

    found = gradients(lambda x, w: ops.einsum("ab,b->a", x, w).value)
    expected = gradients(lambda x, w: ops.dense(x, w[:, None]).value[:, 0])
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
