"""Presets, and rules that assign them to dotted paths."""

import pytest

from unitscale.nn import CONVERSIONS
from unitscale.nn._conversion_rules import as_config, assign, check_rules
from unitscale.quant import Block, Delayed, Dynamic, MatmulConfig, Static, Unit

PATHS = ["embed.up", "layers.0.mlp.up", "layers.0.mlp.down", "layers.1.mlp.up", "head"]


def test_presets_are_the_five_strategies() -> None:
    assert {name: type(config.strategy) for name, config in CONVERSIONS.items()} == {
        "fp8_unit": Unit,
        "fp8_dynamic": Dynamic,
        "fp8_delayed": Delayed,
        "fp8_static": Static,
        "mxfp8": Block,
    }
    # MX recipes keep E4M3 throughout: each block has a scale of its own.
    ranges = {name: config.cotangent for name, config in CONVERSIONS.items()}
    assert ranges.pop("mxfp8") == "float8_e4m3fn"
    assert set(ranges.values()) == {"float8_e5m2"}


def test_a_config_is_itself_or_a_name() -> None:
    config = MatmulConfig(cotangent="e5m2")
    assert as_config(config) is config
    assert as_config("mxfp8") is CONVERSIONS["mxfp8"]
    with pytest.raises(ValueError, match=r"a preset must be .* Did you mean 'fp8_dynamic'"):
        as_config("fp8_dynamc")
    with pytest.raises(ValueError, match=r"got 'fp8'\..* fp8_dynamic measures"):
        as_config("fp8")
    with pytest.raises(TypeError, match=r"serve: a rule must give a MatmulConfig.*got 3"):
        as_config(3, "serve")


def test_the_first_rule_counts() -> None:
    found = assign({"*.0.mlp.up": 1, "*.mlp.*": 2, "head": None}, PATHS, "convert")
    assert {path: value for path, (_, value) in found.items()} == {
        "layers.0.mlp.up": 1,
        "layers.0.mlp.down": 2,
        "layers.1.mlp.up": 2,
        "head": None,
    }
    assert found["layers.1.mlp.up"][0] == "*.mlp.*"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"*.mpl.up": 1}, r"no layer matches '\*.mpl.up'; nearest are layers.0.mlp.up"),
        ({"*": 1, "heads": 2}, r"no layer matches 'heads'; nearest are head"),
        ({"*": 1, "head": 2}, r"an earlier rule has every layer that 'head' matches.*\('\*'\)"),
        # A pattern is of the whole path, and case counts.
        ({"mlp": 1}, "no layer matches 'mlp'"),
        ({"HEAD": 1}, "no layer matches 'HEAD'"),
    ],
)
def test_a_rule_without_layers_is_a_mistake(rules: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign(rules, PATHS, "convert")


def test_a_model_without_layers() -> None:
    with pytest.raises(ValueError, match="no layers of plain Flax with products"):
        assign({"*": 1}, [], "convert")


def test_rules_are_a_mapping_or_one_config() -> None:
    assert check_rules("fp8_unit", "convert") == {"*": "fp8_unit"}
    assert check_rules({"a": None}, "convert") == {"a": None}
    assert check_rules([("a", None), ("b", "mxfp8")], "convert") == {"a": None, "b": "mxfp8"}
    for wrong in (["*"], {1: "fp8_unit"}, None):
        with pytest.raises(TypeError, match="convert: rules must map patterns of dotted paths"):
            check_rules(wrong, "convert")
