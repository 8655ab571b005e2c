"""The table of all primitives is complete."""

import importlib

from unitscale.transforms import coverage, unlisted


def test_every_differentiable_primitive_is_listed() -> None:
    """Kernels of Pallas are not asked for, though it is imported."""
    importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention")
    assert unlisted() == []


def test_every_row_says_what_its_rule_does() -> None:
    for row in coverage().splitlines()[2:]:
        category, summary, primitives = (c.strip() for c in row.strip("| ").split(" | "))
        assert category
        assert summary.endswith(".")
        assert primitives.startswith("`")
