"""Learning-rate factors by role, width and depth."""

from __future__ import annotations

import pytest

from unitscale import rules


@pytest.mark.parametrize(
    ("role", "expected"),
    [("weight", 1 / 8), ("embedding", 1 / 16), ("readout", 1.0), ("bias", 1.0), ("norm", 1.0)],
)
def test_width_and_depth(role, expected) -> None:
    assert rules.umup_learning_rate(role, fan_in=64, fan_out=256) == expected
    assert rules.umup_learning_rate(role, fan_in=64, fan_out=256, depth=16) == expected / 4


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"role must be one of .* Did you mean 'weight'\?"):
        rules.umup_learning_rate("weights", fan_in=1, fan_out=1)
    with pytest.raises(ValueError, match="depth must be at least 1"):
        rules.umup_learning_rate("weight", fan_in=1, fan_out=1, depth=0)
