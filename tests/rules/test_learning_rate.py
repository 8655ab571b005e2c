import math

import pytest

from unitscale import rules

FANS = {"fan_in": 64, "fan_out": 256}


@pytest.mark.parametrize(
    ("role", "factor"),
    [("weight", 1 / 8), ("embedding", 1 / 16), ("readout", 1), ("bias", 1), ("norm", 1)],
)
def test_factor_by_role_and_depth(role, factor) -> None:
    assert rules.umup_learning_rate(role, **FANS) == factor
    for depth in (2, 9, 64):
        found = rules.umup_learning_rate(role, **FANS, depth=depth)
        assert found == pytest.approx(factor / math.sqrt(depth), rel=1e-15)


@pytest.mark.parametrize("role", ["weight", "embedding", "readout", "bias", "norm"])
def test_sgd_makes_up_for_the_readouts_constraint(role) -> None:
    """Width 64 after width 256: what a constrained readout divides gradients by."""
    adam, free = (rules.umup_learning_rate(role, **FANS, optimizer=o) for o in ("adam", "sgd"))
    assert adam == free == rules.umup_learning_rate(role, **FANS)
    bound = {"readout_constraint": "to_output_scale"}
    assert rules.umup_learning_rate(role, **FANS, **bound) == adam
    width = {"weight": 64, "readout": 1}.get(role, 256)
    found = rules.umup_learning_rate(role, **FANS, depth=4, optimizer="sgd", **bound)
    assert found == pytest.approx(adam * width / 2, rel=1e-15)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"optimizer": "adamw"}, "optimizer must be .*; got 'adamw'"),
        ({"readout_constraint": "gmean"}, "readout_constraint must be .*; got 'gmean'"),
    ],
)
def test_unknown_settings(settings, match) -> None:
    with pytest.raises(ValueError, match=match):
        rules.umup_learning_rate("weight", **FANS, **settings)


@pytest.mark.parametrize("width", [64, 1024])
def test_an_update_moves_an_output_as_far_at_every_width(width) -> None:
    """Updates of one sign and of unit size, against activations they correlate with."""
    factor = rules.umup_learning_rate("weight", fan_in=width, fan_out=width)
    forward = rules.dense(width, width, 1).fwd
    # The output's change: a sum over the width of (factor * 1) times a unit activation.
    assert forward * width * factor == pytest.approx(1.0, rel=1e-12)
    readout = rules.umup_learning_rate("readout", fan_in=width, fan_out=8)
    assert rules.readout(width, 8, 1).fwd * width * readout == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (("wieght", 4, 4, 1), ValueError, r"one of weight, .*got 'wieght'.*Did you mean 'weight'"),
        ((None, 4, 4, 1), ValueError, "role must be one of .*got None"),
        (("weight", 0, 4, 1), ValueError, "fan_in must be at least 1; got 0"),
        (("weight", 4, -1, 1), ValueError, "fan_out must be at least 1; got -1"),
        (("weight", 4, 4, 0), ValueError, "depth must be at least 1; got 0"),
        (("weight", 4.5, 4, 1), TypeError, "fan_in must be"),
    ],
)
def test_errors(arguments, error, match) -> None:
    role, fan_in, fan_out, depth = arguments
    with pytest.raises(error, match=match):
        rules.umup_learning_rate(role, fan_in=fan_in, fan_out=fan_out, depth=depth)
