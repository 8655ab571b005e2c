"""Low-rank updates of imported decoders: what is trained, what is frozen, and in which format."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.config import LoraConfig
from recipes.errors import RecipeError
from recipes.hf import Frozen, adapt, load
from tests.recipes.pretrained import FIXTURES

IDS = np.arange(3, 11)[None]
ATTENTION = ("query", "key", "value")


def adapted(name: str, dtype: Any = jnp.float32, **settings: Any) -> Any:
    """A model of a folder as the recipe loads it, with an update of its attention."""
    model = load(FIXTURES / name, dtype=dtype, on_host=True).model
    adapt(model, LoraConfig.model_validate({"rank": 2, "targets": ATTENTION} | settings))
    return model


def by_path(model: Any, kind: type) -> dict[str, Any]:
    flat = nnx.to_flat_state(nnx.state(model, kind))
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in flat}


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_the_first_function_is_that_of_the_folder(name: str) -> None:
    """To the bit, also where frozen matrices are in the type that products are computed in."""
    base = load(FIXTURES / name, dtype=jnp.bfloat16).model
    model = adapted(name, jnp.bfloat16)
    np.testing.assert_array_equal(model(IDS), base(IDS))
    frozen = by_path(model, Frozen)
    assert {value.dtype.name for value in frozen.values() if value.ndim > 1} == {"bfloat16"}
    assert {value.dtype.name for value in frozen.values() if value.ndim == 1} == {"float32"}


def test_updates_alone_are_parameters() -> None:
    """Llama's products have two matrices each; those of GPT-2's one tensor share the first."""
    shapes = {
        "llama3": {"query": [(16, 2), (2, 24)], "key": [(16, 2), (2, 12)]},
        "gpt2": {"query": [(2, 16)], "key": [(16, 2), (2, 16)]},
    }
    for name, expected in shapes.items():
        params = by_path(adapted(name), nnx.Param)
        assert len(params) == 2 * (4 if name == "gpt2" else 6)
        for layer, wanted in expected.items():
            found = [v.shape for k, v in params.items() if f"layers.1.attention.{layer}." in k]
            assert found == wanted
        assert all((value == 0).all() == key.endswith("_b") for key, value in params.items())
    gpt2 = adapted("gpt2").layers[0].attention
    assert gpt2.query.lora_a is gpt2.value.lora_a


def test_an_update_is_added() -> None:
    """x (W + alpha / rank a b) + bias, in float64, and its gradients."""
    layer = adapted("llama3", alpha=6.0).layers[0].attention.key
    draw = np.random.default_rng(0)
    x, b, dy = (draw.normal(size=shape) for shape in ((5, 16), (2, 12), (5, 12)))
    layer.lora_b.set_value(jnp.asarray(b, jnp.float32))
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

    def run(params, x):
        return nnx.merge(graphdef, params, rest)(x)

    y, pull = jax.vjp(run, params, jnp.asarray(x, jnp.float32))
    grads, dx = pull(jnp.asarray(dy, jnp.float32))
    w, a = (np.asarray(p.get_value(), np.float64) for p in (layer.kernel, layer.lora_a))
    bias = np.asarray(layer.base.bias.get_value(), np.float64)
    np.testing.assert_allclose(y, x @ (w + 3 * a @ b) + bias, atol=1e-5)
    np.testing.assert_allclose(dx, dy @ (w + 3 * a @ b).T, atol=1e-5)
    np.testing.assert_allclose(grads["lora_a"].get_value(), 3 * x.T @ dy @ b.T, atol=1e-4)
    np.testing.assert_allclose(grads["lora_b"].get_value(), 3 * (x @ a).T @ dy, atol=1e-4)


@pytest.mark.parametrize(("base", "bits"), [("float8_e4m3fn", 4), ("float8_e5m2", 3)])
def test_a_base_in_fp8(base: str, bits: int) -> None:
    """One byte a weight, a power of two an output, and each weight rounded to the format."""
    whole, model = load(FIXTURES / "llama3").model, adapted("llama3", base=base)
    for name in ("gate", "down"):
        exact = np.asarray(getattr(whole.layers[1].mlp, name).kernel.get_value(), np.float64)
        kernel = getattr(model.layers[1].mlp, name).kernel.get_value()
        assert (kernel.data.dtype, kernel.scale.shape) == (base, (1, exact.shape[1]))
        assert (np.frexp(kernel.scale)[0] == 0.5).all()
        # Relative to a normal number; a subnormal one's error is that of the least normal one.
        least = float(jnp.finfo(base).smallest_normal) * np.asarray(kernel.scale, np.float64)
        error = np.abs(np.asarray(kernel.value, np.float64) - exact)
        assert (error <= 2.0**-bits * np.maximum(np.abs(exact), least)).all()
        assert error.max() > 0
    assert by_path(model, Frozen)["embed.embedding"].dtype == jnp.float32


def test_a_product_of_a_frozen_base_is_that_of_its_rounded_weights() -> None:
    """And what the backward pass is given has no wide copy of the kernel."""
    layer = adapted("llama3", base="float8_e4m3fn").layers[0].attention.out
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 24)), jnp.float32)
    y, pull = jax.vjp(layer, x)
    kernel = np.asarray(layer.kernel.get_value().value, np.float64)
    bias = np.asarray(layer.bias.get_value(), np.float64)
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ kernel + bias, atol=1e-5)
    (dx,) = pull(jnp.ones_like(y))
    np.testing.assert_allclose(dx, np.ones(y.shape) @ kernel.T, atol=1e-5)
    saved = {leaf.dtype.name for leaf in jax.tree.leaves(pull) if leaf.shape == kernel.shape}
    assert saved == {"float8_e4m3fn"}


def test_nothing_is_drawn_for_a_model_on_the_host() -> None:
    model = load(FIXTURES / "gpt2", dropout=0.5, on_host=True).model
    assert all(isinstance(value, np.ndarray) for value in by_path(model, nnx.Param).values())
    drawn = load(FIXTURES / "gpt2", dropout=0.5).model
    keys = [jax.tree.leaves(nnx.state(one, nnx.RngState)) for one in (model, drawn)]
    assert len(keys[0]) == len(keys[1]) > 2
    for one, other in zip(*keys, strict=True):
        assert (one == other).all()


REFUSED = [
    ("gpt2", ("query", "value"), r"all of query, key, value or none, as transformer\.h\.0\.attn"),
    ("gpt2", ("gate",), r"some of down, key, out, query, up, value, .*got gate; remove gate"),
]


@pytest.mark.parametrize(("name", "targets", "message"), REFUSED)
def test_layers_that_are_not_there(name: str, targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        adapted(name, targets=targets)
