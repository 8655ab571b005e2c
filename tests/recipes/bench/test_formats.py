"""Where FP8 loses: each variant quantizes what it says, and errors are those of NumPy."""

import numpy as np
import pytest
from flax import nnx

from recipes.bench import formats
from recipes.bench._compare import comparison, configs_of
from recipes.bench._runs import Told
from unitscale.nn import Dense

WORDS = ["model.width=16", "model.layers=1", "model.heads=2", "data.sequence_length=8"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("float32", {}),
        ("none", {}),
        ("query", {"query": ("float8_e4m3fn",) * 3}),
        ("query and key", dict.fromkeys(("query", "key"), ("float8_e4m3fn",) * 3)),
        ("all", dict.fromkeys(formats.LAYERS, ("float8_e4m3fn",) * 3)),
        (
            "all but query and key",
            dict.fromkeys(("value", "out", "up", "down"), ("float8_e4m3fn",) * 3),
        ),
        (
            "activations",
            dict.fromkeys(formats.LAYERS, ("float8_e4m3fn", "bfloat16", "bfloat16")),
        ),
        ("weights", dict.fromkeys(formats.LAYERS, ("bfloat16", "float8_e4m3fn", "bfloat16"))),
        (
            "cotangents in E5M2",
            dict.fromkeys(formats.LAYERS, ("bfloat16", "bfloat16", "float8_e5m2")),
        ),
    ],
)
def test_a_variant_quantizes_what_it_says(name: str, expected: dict) -> None:
    (config,) = configs_of(comparison("parity"), Told(overrides=WORDS), "float32")
    graphdef = formats.structure(config, name)
    plain = config.model_copy(update={"policy": "float32"})
    state = nnx.state(formats.recipe_of(plain).build(plain))
    found = {
        str(path[-1]): (matmul.lhs, matmul.rhs, matmul.cotangent)
        for path, layer in nnx.iter_modules(nnx.merge(graphdef, state))
        if isinstance(layer, Dense) and (matmul := layer.policy.matmul_for(layer.role))
    }
    assert found == expected


def test_the_error_is_a_mean_over_kernels() -> None:
    exact = {
        "kernel": np.array([[3.0, 4.0]]),
        "other": np.array([[1.0], [0.0]]),
        "bias": np.ones(2),
    }
    ours = {
        "kernel": np.array([[3.0, 5.0]]),
        "other": np.array([[1.0], [1.0]]),
        "bias": np.zeros(2),
    }
    assert formats.error(ours, exact) == pytest.approx((1 / 5 + 1) / 2)
