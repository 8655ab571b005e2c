"""Configs of a GPT, and the models built from them."""

from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pydantic import ValidationError

from recipes.config.run import Policy
from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.gpt.task import build, load_tokenizer
from recipes.run.probe import probe
from recipes.run.state import init_state
from recipes.run.step import make_train_step
from tests.products import conversions
from unitscale import nn
from unitscale.nn import AmaxState

MakeConfig = Callable[..., GPTConfig]
IDS = jnp.zeros((1, 16), jnp.int32)


def products_in_fp8(model: Any) -> int:
    return len(conversions(jax.make_jaxpr(model)(IDS), "float8_e4m3fn"))


def test_products_of_layers_are_converted_and_weights_are_not(make_config: MakeConfig) -> None:
    plain = build(make_config("precision.policy=float16"))
    model: Any = build(make_config("precision.policy=float16", "precision.matmuls=fp8_dynamic"))
    # Both operands of query, key, value, out, up and down; not of the readout.
    assert (products_in_fp8(plain), products_in_fp8(model)) == (0, 12)
    assert model(IDS).dtype == jnp.float16
    leaves = [jax.tree.leaves(nnx.state(one, nnx.Param)) for one in (plain, model)]
    jax.tree.map(np.testing.assert_array_equal, *leaves)


@pytest.mark.slow
def test_the_shared_step_keeps_delayed_scales(make_config: MakeConfig) -> None:
    graphdef, optimizer, state = init_state(make_config("precision.matmuls=fp8_delayed"))
    step = make_train_step(graphdef, optimizer)
    before = jax.tree.map(np.asarray, nnx.split_state(state.rest, AmaxState, ...)[0])
    state, _ = step(state, jnp.zeros((4, 17), jnp.int32), np.int32(0))
    after = nnx.split_state(state.rest, AmaxState, ...)[0]
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    changed = [bool(np.any(np.asarray(new) != old)) for old, new in pairs]
    assert len(jax.tree.leaves(before)) >= 6
    assert any(changed)


def test_qwix_is_asked_for_where_it_is_missing(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(RecipeError, match=r"precision\.matmuls: expected qwix .*pip install qwix"):
        build(make_config("precision.matmuls=qwix"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.library=unitscale", "precision.matmuls=qwix"], r"are for plain models"),
        (["precision=scalify_float16", "precision.matmuls=qwix"], "scalify null"),
        (["lora={}"], r"lora needs init, a Hugging Face folder; got None"),
        (["precision.policy=fp8"], "precision.policy .* need a unitscale model"),
    ],
)
def test_products_are_of_plain_models(
    make_config: MakeConfig, words: list[str], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        make_config(*words)


def test_the_end_of_documents_is_that_of_the_tokenizer(make_config: MakeConfig) -> None:
    config = make_config("model.library=unitscale", "model.document_end=3")
    with pytest.raises(RecipeError, match=r"model\.document_end: expected .* None; got 3"):
        load_tokenizer(config)


def test_what_is_computed_again_changes_nothing(make_config: MakeConfig) -> None:
    """The same loss, updates and draws of dropout of two steps, and the same probe of layers."""
    taken = []
    for remat in ("none", "layer"):
        config = make_config(f"model.remat={remat}")
        graphdef, optimizer, state = init_state(config)
        reading = probe(nnx.merge(graphdef, state.params, state.rest), IDS, IDS)
        ids = np.arange(68, dtype=np.int32).reshape(4, 17)
        step = make_train_step(graphdef, optimizer)
        state, _ = step(state, ids, np.int32(0))
        state, values = step(state, ids, np.int32(1))
        taken.append((dict(reading.activations), values, state.params))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, 1e-5, 1e-6), *taken)


def test_policies_are_presets_of_the_library() -> None:
    for policy in get_args(Policy):
        assert nn.as_policy(policy)


def test_config_is_frozen() -> None:
    config = GPTConfig(name="x")
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1


@pytest.mark.parametrize("library", ["unitscale", "plain"])
def test_biases_of_linear_layers(library: str) -> None:
    """All six linear layers of a Transformer layer have one; the readout has not."""
    model = {"library": library, "layers": 1, "norm": "layer"}
    optimizer = {"umup": library == "unitscale"}
    count = {}
    for bias in (False, True):
        config = GPTConfig.model_validate(
            {"name": "x", "model": model | {"bias": bias}, "optimizer": optimizer}
        )
        state = nnx.eval_shape(lambda config=config: nnx.state(build(config), nnx.Param))
        names = [str(path[-1]) for path, _ in nnx.to_flat_state(state)]
        count[bias] = names.count("bias")
    assert count[True] - count[False] == 6
