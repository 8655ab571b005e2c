"""The primitives, and that they are those of the core."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import core, ops
from unitscale.core import ScaledArray

from .conformance import DTYPES, check, normal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fwd", "bwd"), [(0.3, 0.7), (1.0, 0.7), (0.3, 1.0)])
def test_scale(fwd: float, bwd: float, dtype: str) -> None:
    op = functools.partial(ops.scale, fwd=fwd, bwd=bwd)
    x = normal("scale", (3, 4))
    transforms = ("grad", "jit", "vmap", "scan", "checkpoint") if fwd == 0.3 else ("jit",)
    check(op, lambda x: x, x, fwd=fwd, bwd=(bwd,), dtype=dtype, step=1.0, transforms=transforms)
    check(
        op,
        lambda x: x,
        x,
        fwd=fwd,
        bwd=(bwd,),
        dtype=dtype,
        step=1.0,
        scales=(2.0**12,),
        transforms=("jit",),
    )


def test_one_sided() -> None:
    x = jnp.float32(2)
    assert jax.value_and_grad(lambda x: ops.scale_fwd(x, 3.0))(x) == (6.0, 1.0)
    assert jax.value_and_grad(lambda x: ops.scale_bwd(x, 3.0))(x) == (2.0, 3.0)


def test_narrow_data_is_multiplied_wide() -> None:
    x = jnp.float16(2.0**-14)
    y, vjp = jax.vjp(lambda x: ops.scale(x, 1e-5, 1e5), x)
    # 1e-5 is below the normal range of float16, and 1e5 beyond its range.
    assert y == np.float16(2.0**-14 * 1e-5)
    assert vjp(x)[0] == np.float16(2.0**-14 * 1e5)


def test_they_are_those_of_the_core() -> None:
    assert (ops.scale, ops.scale_fwd, ops.scale_bwd) == (
        core.scale,
        core.scale_fwd,
        core.scale_bwd,
    )


def test_a_scale_stays() -> None:
    y = ops.scale(ScaledArray(jnp.ones(2), 8.0), 2.0, 1.0)
    assert y.scale == 8
    np.testing.assert_array_equal(y.data, 2)


def test_traced_factor() -> None:
    with pytest.raises(TypeError, match="fwd must be a static Python number"):
        ops.scale(jnp.ones(2), jnp.float32(2), 1.0)
