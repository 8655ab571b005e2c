"""The primitives are those of the core, whose tests are in `tests/core/test_factor.py`."""

import functools

from unitscale import core, ops

from .conformance import in_every_dtype, linear, normal


def test_they_are_those_of_the_core() -> None:
    for name in ("scale", "scale_fwd", "scale_bwd"):
        assert getattr(ops, name) is getattr(core, name)


PLAIN = linear(
    functools.partial(ops.scale, fwd=0.3, bwd=0.7),
    lambda x: x,
    normal("scale", (3, 4)),
    fwd=0.3,
    bwd=(0.7,),
)
scaled = functools.partial(PLAIN, scales=(2.0**12,), transforms=("jit",))
test_scale = in_every_dtype({"plain": PLAIN, "scaled": scaled})
