"""Low-rank updates against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.refusals import refuses
from unitscale import ops
from unitscale.core import ScaledArray

from .conformance import (
    assert_scales_are_constants,
    assert_unit,
    in_every_dtype,
    linear,
    normal,
)

IN, RANK, OUT, ROWS = 5, 3, 4, 6
FWD = (IN * RANK) ** -0.5
BWD = (FWD, (ROWS * OUT) ** -0.5, (ROWS * IN) ** -0.5)
SHAPES = ((2, 3, IN), (IN, RANK), (RANK, OUT))


def update(x, a, b, base=None):
    """The base divided by the factor that `check` multiplies it with."""
    return x @ a @ b + (0 if base is None else base / FWD)


CASES = {
    "update": linear(ops.lora, update, normal("lora", *SHAPES), fwd=FWD, bwd=BWD, slack=3),
    "base": linear(
        ops.lora,
        update,
        normal("base", *SHAPES, (2, 3, OUT)),
        fwd=FWD,
        bwd=(*BWD, FWD),
        slack=4,
    ),
}
test_value_and_gradients = in_every_dtype(CASES)
SCALED = [
    (2.0**6, 0.25, 2.0, 4.0),
    (np.float32([[[1], [2], [64]]]), 0.25, None, 2.0),  # one per row
    (0.5, np.float32([1, 2, 4]), np.float32([1, 2, 8, 4]), None),  # per column
]


@pytest.mark.parametrize("scales", SCALED[:2])
def test_scales_of_the_update(scales) -> None:
    CASES["update"](scales=scales[:3])


@pytest.mark.parametrize("scales", SCALED)
def test_values_under_scales(scales) -> None:
    args = normal("values", *SHAPES, (2, 3, OUT))
    operands = [
        ScaledArray(jnp.asarray(a, jnp.float32), s) for a, s in zip(args, scales, strict=True)
    ]
    values = [a if s is None else a * s for a, s in zip(args, scales, strict=True)]
    found = ops.lora(*operands)
    np.testing.assert_allclose(found.value, FWD * update(*values), rtol=1e-4, atol=1e-3)
    assert_scales_are_constants(ops.lora, *(ScaledArray(o.data, 2.0) for o in operands))


def test_an_update_of_zero_leaves_the_base_as_it_is() -> None:
    x, a, b, base = (jnp.asarray(v, jnp.float16) for v in normal("zero", *SHAPES, (2, 3, OUT)))
    for given in (base, ScaledArray(base, 2.0**9)):
        found = ops.lora(x.astype(jnp.float32), a, 0 * b, given)
        assert found.dtype == jnp.float16
        np.testing.assert_array_equal(found.value, getattr(given, "value", given))


def test_unit() -> None:
    # The input gradient has the factor of the forward pass.
    assert_unit(ops.lora, (32, 64), (64, 16), (16, 48), unit=(True, False, True, True))
    assert_unit(ops.lora, (32, 64), (64, 16), (16, 64))


x, a, b = jnp.ones((2, 4)), jnp.ones((4, 3)), jnp.ones((3, 5))
test_errors = refuses(
    [
        (ValueError, lambda: ops.lora(x, b, a), r"ops\.lora: x must be \(\.\.\., in\).*got x \(2"),
        (ValueError, lambda: ops.lora(x, a, a), "rank"),
        (
            ValueError,
            lambda: ops.lora(x, a, b, x),
            r"base must be \(\.\.\., out\); got .*base \(2, 4",
        ),
        (TypeError, lambda: ops.lora(x, a, b > 0), r"ops\.lora: b must be a floating array"),
    ]
)


@pytest.mark.parametrize(
    "shapes", [((2, 5), (4, 3), (3, 6)), ((2, 4), (4, 3), (2, 6)), ((2, 4), (4,), (3, 6))]
)
def test_shapes_that_do_not_chain(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"a \(in, rank\) and b \(rank, out\)"):
        ops.lora(*map(jnp.ones, shapes))
