"""MatmulConfig: names, pairs, errors."""

import dataclasses

import ml_dtypes
import pytest

from unitscale.quant import MatmulConfig, Unit


def test_defaults() -> None:
    config = MatmulConfig()
    assert (config.lhs, config.rhs, config.cotangent) == ("float8_e4m3fn",) * 3
    assert config.strategy == Unit()


def test_names_become_canonical_so_that_equal_configs_are_equal() -> None:
    config = MatmulConfig(lhs="e4m3fn", cotangent="e5m2")
    assert config == MatmulConfig(cotangent=ml_dtypes.float8_e5m2)
    assert hash(config) == hash(MatmulConfig(cotangent="float8_e5m2"))
    assert config.cotangent == "float8_e5m2"
    assert MatmulConfig(lhs="E4M3").lhs == "E4M3"
    assert MatmulConfig(lhs="bfloat16").lhs == "bfloat16"


def test_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MatmulConfig().lhs = "float16"
    with pytest.raises(TypeError, match="positional"):
        MatmulConfig("float8_e4m3fn")
    with pytest.raises(TypeError, match="cotangents"):
        MatmulConfig(cotangents="float8_e5m2")


@pytest.mark.parametrize(
    ("kwargs", "pair"),
    [
        ({"lhs": "e5m2", "rhs": "float8_e5m2"}, "lhs and rhs"),
        ({"rhs": "e5m2", "cotangent": "e5m2"}, "rhs and cotangent"),
        ({"lhs": "e5m2", "cotangent": "e5m2"}, "lhs and cotangent"),
    ],
)
def test_e5m2_twice(kwargs, pair) -> None:
    with pytest.raises(ValueError, match=rf"MatmulConfig: {pair} are both E5M2.*E4M3 x E5M2"):
        MatmulConfig(**kwargs)


@pytest.mark.parametrize("single", ["lhs", "rhs", "cotangent"])
def test_e5m2_once(single) -> None:
    assert getattr(MatmulConfig(**{single: "e5m2"}), single) == "float8_e5m2"


@pytest.mark.parametrize("wide", ["float16", "bfloat16"])
def test_formats_of_16_bits_twice(wide) -> None:
    """float16 has as many bits of exponent as E5M2."""
    assert MatmulConfig(lhs=wide, rhs=wide).rhs == wide


@pytest.mark.parametrize("wrong", ["e4m2", "float7", "int8"])
def test_unknown_format(wrong) -> None:
    with pytest.raises(ValueError, match=wrong):
        MatmulConfig(rhs=wrong)


@pytest.mark.parametrize("name", ["e4m3fnuz", "e5m2fnuz"])
def test_fnuz_formats_have_no_products(name) -> None:
    match = rf"MatmulConfig: rhs is float8_{name}, .*supported pairs are E4M3 x E4M3.*float8_e5m2"
    with pytest.raises(ValueError, match=match):
        MatmulConfig(rhs=name)


def test_formats_without_negative_numbers() -> None:
    with pytest.raises(ValueError, match="rhs is float8_e8m0fnu, which has no negative numbers"):
        MatmulConfig(rhs="float8_e8m0fnu")


def test_unknown_strategy() -> None:
    with pytest.raises(TypeError, match=r"strategy must be Unit.*Block.*; got 'unit'"):
        MatmulConfig(strategy="unit")
