"""Residual branches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.refusals import refuses
from unitscale import ops, rules
from unitscale.core import ScaledArray

from .conformance import (
    assert_scales_are_constants,
    assert_unit,
    case,
    in_every_dtype,
    linear,
    normal,
    under_scales,
)

TAU = 0.75  # weights 0.6 and 0.8
TANH = rules.elementwise(jnp.tanh).fwd


TOTAL = case(
    lambda x: ops.residual(ops.tanh, x, TAU),
    lambda x: 0.6 * TANH * np.tanh(x) + 0.8 * x,
    normal("residual", (3, 4)),
    fwd=1.0,
    bwd=(1.0,),
    # Two roundings of the branch, two of the gradients and one of their sum.
    slack=2,
)
scaled = functools.partial(TOTAL, scales=(8.0,), transforms=("jit",))
test_the_total_gradient_is_true = in_every_dtype({"plain": TOTAL, "scaled": scaled})


# Forward weights 0.6 and 0.8; backward the identity, which is the derivative without them.
SUM = linear(
    functools.partial(ops.residual_add, tau=TAU),
    lambda branch, skip: 0.6 * branch + 0.8 * skip,
    normal("add", (3, 4), (3, 4)),
    fwd=1.0,
    bwd=(1 / 0.6, 1 / 0.8),
)
test_add_delays_its_weights = under_scales(
    [(None, None), (2.0**12, 2.0**12), (4.0, 2.0**-12)], {"add": SUM}
)


HALVES = {
    f"part {i}": linear(
        lambda x, i=i: ops.residual_split(x, TAU)[i],
        lambda x: x,
        normal("split", (3, 4)),
        fwd=1.0,
        bwd=(weight,),
        dtype="float16",
    )
    for i, weight in enumerate((0.6, 0.8))
}
test_split_applies_them = under_scales([(None,), (8.0,)], HALVES)


def test_gradients_inside_the_branch_do_not_see_tau() -> None:
    x, w = (jnp.asarray(a, jnp.float32) for a in normal("branch", (8, 4), (4, 4)))
    ct = jnp.ones((8, 4))

    def branch(w):
        return ops.dense(x, w).data

    def whole(w):
        return ops.residual(lambda x: ops.dense(x, w), x, 0.01).data

    (alone,), (inside,) = jax.vjp(branch, w)[1](ct), jax.vjp(whole, w)[1](ct)
    np.testing.assert_allclose(inside, alone, rtol=1e-6)


def test_dtype_and_scale_of_the_stream() -> None:
    stream, branch = jnp.ones(3, jnp.float32), jnp.ones(3, jnp.bfloat16)
    assert ops.residual_add(branch, stream, TAU).dtype == jnp.float32
    assert ops.residual_add(stream, branch, TAU).dtype == jnp.bfloat16
    scaled = ScaledArray(branch, 8.0)
    assert ops.residual(lambda x: x, scaled, 1.0).scale == 8
    for half in ops.residual_split(scaled, TAU):
        assert half.scale == 8
    assert_scales_are_constants(lambda x: ops.residual(ops.gelu, x, TAU), ScaledArray(stream, 8.0))
    add = functools.partial(ops.residual_add, tau=TAU)
    assert_scales_are_constants(add, ScaledArray(stream, 8.0), ScaledArray(stream, 2.0))


@pytest.mark.parametrize("tau", [0.1, 1.0, 3.0])
def test_unit_variance(tau: float) -> None:
    assert_unit(functools.partial(ops.residual_add, tau=tau), (32, 32), (32, 32))


x = jnp.ones((2, 3))
ERRORS = [
    (ValueError, lambda: ops.residual_add(x, x[:1], 1.0), "residual_add: branch and skip"),
    (ValueError, lambda: ops.residual(lambda x: x.data[0], x, 1.0), "branch and skip"),
    (ValueError, lambda: ops.residual_split(x, 0.0), "tau must be positive"),
    (ValueError, lambda: ops.residual_add(x, x, -1.0), "tau must be positive"),
    (TypeError, lambda: ops.residual_split(x > 0, 1.0), r"residual_split: x must be a floating"),
    (TypeError, lambda: ops.residual_add(x > 0, x, 1.0), "residual_add: branch must"),
]


test_errors = refuses(ERRORS)
