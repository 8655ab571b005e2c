"""Where FP8 loses: each variant quantizes what it says, and errors are those of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.bench import formats
from recipes.bench._compare import comparison, configs_of
from recipes.bench._runs import Told
from unitscale.nn import Dense
from unitscale.quant import Contraction, MatmulConfig, contract

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


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_dithered_cotangents_are_right_in_the_mean(dtype: str) -> None:
    config = MatmulConfig(lhs="float32", rhs="float32", cotangent=dtype)
    step = float(jnp.finfo(dtype).eps)
    cotangent = jnp.linspace(1.0, 1.0 + step / 2, 4096)[:, None]  # below the middle of a step

    def mean_of_gradients() -> float:
        _, vjp = jax.vjp(
            lambda w: contract(
                jnp.ones((4096, 1)), w, Contraction("tk", "kn", "tn"), config=config
            ),
            jnp.ones((1, 1)),
        )
        return vjp(cotangent)[0].item() / 4096

    def mean_in_float32() -> float:
        _, vjp = jax.vjp(
            lambda w: contract(jnp.ones((4096, 1)), w, Contraction("tk", "kn", "tn")),
            jnp.ones((1, 1)),
        )
        return vjp(cotangent)[0].item() / 4096

    exact = 1.0 + step / 4
    with formats.dithered_cotangents(None):
        assert mean_of_gradients() == pytest.approx(1.0, abs=step / 100)
    with formats.dithered_cotangents(dtype):
        assert mean_in_float32() == pytest.approx(exact, abs=step / 10000)
        assert mean_of_gradients() == pytest.approx(exact, abs=step / 50)


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
