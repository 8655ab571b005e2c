"""The primitives are those of the core, whose tests are in `tests/core/test_factor.py`."""

from __future__ import annotations

import functools

import pytest

from unitscale import core, ops

from .conformance import DTYPES, TRANSFORMS, check, normal


def test_they_are_those_of_the_core() -> None:
    for name in ("scale", "scale_fwd", "scale_bwd"):
        assert getattr(ops, name) is getattr(core, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 2.0**12])
def test_scale(scale: float | None, dtype: str) -> None:
    check(
        functools.partial(ops.scale, fwd=0.3, bwd=0.7),
        lambda x: x,
        normal("scale", (3, 4)),
        fwd=0.3,
        bwd=(0.7,),
        dtype=dtype,
        step=1.0,
        scales=(scale,),
        transforms=("jit",) if scale else TRANSFORMS[dtype],
    )
