"""The primitives are those of the core, whose tests are in `tests/core/test_factor.py`."""

from unitscale import core, ops


def test_they_are_those_of_the_core() -> None:
    for name in ("scale", "scale_fwd", "scale_bwd"):
        assert getattr(ops, name) is getattr(core, name)
