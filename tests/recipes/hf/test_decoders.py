"""The config.json of each decoder: older spellings, defaults, and that every key counts."""

import importlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.config import DecoderConfig, GPTModelConfig
from recipes.errors import RecipeError
from recipes.hf import load, save
from recipes.hf._decoders import FAMILY, family_shape
from tests.recipes.make_pretrained_fixtures import DECODERS, LINEAR, LLAMA3
from tests.recipes.pretrained import FIXTURES, change_config, copied, reference

TOLERANCE = 1e-4


def shape_of(folder: str, **changes: Any) -> GPTModelConfig:
    """The shape in a folder's config.json with other keys; Ellipsis takes one out."""
    path = FIXTURES / folder
    keys = json.loads((path / "config.json").read_text("utf-8")) | changes
    return family_shape({k: v for k, v in keys.items() if v is not ...}, path)


OLD_LLAMA3 = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
# folder, keys as older versions of transformers wrote them
OLD = [
    ("llama3", {"rope_parameters": ..., "rope_theta": 50.0, "rope_scaling": OLD_LLAMA3}),
    (
        "llama2",
        {
            "rope_parameters": ...,
            "rope_theta": 100,
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
    ),
    ("llama2", {"rope_parameters": LINEAR | {"type": "linear"}, "head_dim": ...}),
    ("mistral", {"rope_parameters": ..., "rope_scaling": None, "head_dim": 6, "use_cache": True}),
    ("qwen2", {"layer_types": ...}),
    ("gemma2", {"layer_types": ..., "hidden_act": "gelu_pytorch_tanh", "rope_parameters": None}),
    (
        "gemma3",
        {
            "layer_types": ...,
            "sliding_window_pattern": 2,
            "rope_parameters": ...,
            "rope_theta": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_local_base_freq": 20.0,
        },
    ),
]


@pytest.mark.parametrize(("folder", "keys"), OLD)
def test_older_spellings(folder: str, keys: dict[str, Any]) -> None:
    assert shape_of(folder, **keys) == shape_of(folder)


def test_a_published_file() -> None:
    """Keys of a Gemma 3 of a billion parameters, as its folder has them."""
    keys = {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "initializer_range": 0.02,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "use_cache": True,
        "vocab_size": 262144,
    }
    shape = family_shape(keys, Path("gemma"))
    own = shape.variant
    assert (shape.hidden, shape.head_dim, shape.kv_heads, shape.tied_readout) == (
        6912,
        256,
        1,
        True,
    )
    assert sorted(set(range(26)) - set(own.local_layers)) == [5, 11, 17, 23]
    assert (own.window, own.attention_scale, own.attention_cap) == (512, 1 / 16, None)
    assert (own.rope.base, own.local_rope and own.local_rope.base) == (1e6, 1e4)
    assert own.norm_offset
    assert own.post_norms
    assert own.query_key_norms
    assert own.embedding_scale


LOCAL = {"rope_type": "default", "rope_theta": 20.0}
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 8.0}
YARN |= {"original_max_position_embeddings": 16, "beta_fast": 2.0}
# folder, keys that change what is computed but no tensor
COUNT = [
    ("llama2", {"rms_norm_eps": 0.1}),
    ("llama2", {"hidden_act": "gelu"}),
    ("llama2", {"rope_parameters": LINEAR | {"factor": 3.0}}),
    ("llama2", {"rope_parameters": LINEAR | {"rope_theta": 99.0}}),
    ("llama3", {"rope_parameters": LLAMA3 | {"rope_theta": 40.0}}),
    ("llama3", {"rope_parameters": LLAMA3 | {"factor": 7.0}}),
    ("llama3", {"rope_parameters": LLAMA3 | {"low_freq_factor": 1.5}}),
    ("llama3", {"rope_parameters": LLAMA3 | {"high_freq_factor": 3.0}}),
    ("llama3", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}}),
    ("qwen3", {"rope_parameters": YARN}),
    ("mistral", {"sliding_window": 5}),
    ("qwen2", {"sliding_window": 4}),
    ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}),
    ("gemma2", {"hidden_activation": "silu"}),
    ("gemma2", {"query_pre_attn_scalar": 6}),
    ("gemma2", {"attn_logit_softcapping": 0.6}),
    ("gemma2", {"final_logit_softcapping": 3.0}),
    ("gemma2", {"sliding_window": 5}),
    ("gemma3", {"layer_types": ["full_attention", "full_attention"]}),
    ("gemma3", {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LINEAR}}),
    ("gemma3", {"rope_parameters": {"full_attention": LOCAL, "sliding_attention": LOCAL}}),
    ("gemma3", {"final_logit_softcapping": 3.0}),
]


@pytest.mark.parametrize(("folder", "keys"), COUNT)
def test_every_key_counts(folder: str, keys: dict[str, Any], tmp_path: Path) -> None:
    changed = copied(folder, tmp_path)
    change_config(changed, **keys)
    inputs, expected = reference(changed)
    found = np.asarray(load(changed).model(*inputs))
    assert np.abs(found - expected).max() > 5 * TOLERANCE


@pytest.mark.parametrize("folder", DECODERS)
def test_cached_logits_are_the_uncached_ones(folder: str) -> None:
    """A prompt, then a token at a time, past the window."""
    (ids,), expected = reference(FIXTURES / folder)
    graphdef, state = nnx.split(load(FIXTURES / folder).model)
    step = jax.jit(lambda state, ids, cache: nnx.merge(graphdef, state)(ids, cache=cache))
    cache = nnx.merge(graphdef, state).init_cache(len(ids), ids.shape[1] + 1)
    pieces = []
    for piece in np.split(ids, [4, 5, 6, 7, 8, 9, 10], axis=1):
        out, cache = step(state, jnp.asarray(piece), cache)
        pieces.append(out)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), expected, atol=TOLERANCE)


def scaled(rope: dict[str, Any], to: Path) -> Path:
    """A Qwen3 whose rotary positions are scaled."""
    folder = copied("qwen3", to)
    change_config(folder, rope_parameters=rope)
    return folder


def test_yarn_is_cached_and_written_back(tmp_path: Path) -> None:
    folder = scaled(YARN, tmp_path)
    (ids,), _ = reference(folder)
    read = load(folder)
    whole = read.model(ids)
    cache = read.model.init_cache(len(ids), ids.shape[1])
    first, cache = read.model(ids[:, :7], cache=cache)
    rest, _ = read.model(ids[:, 7:], cache=cache)
    np.testing.assert_allclose(np.concatenate([first, rest], 1), whole, atol=TOLERANCE)
    save(read, tmp_path / "new")
    for file in (tmp_path / "new").iterdir():
        assert file.read_bytes() == (folder / file.name).read_bytes()


def test_yarn_multiplies_the_scores(tmp_path: Path) -> None:
    """A factor f of queries and keys is one of f^2 of the scores."""
    folder = scaled(YARN | {"attention_factor": 1.5}, tmp_path)
    (ids,), _ = reference(folder)
    found = load(folder).model(ids)
    other = load(scaled(YARN | {"attention_factor": 1.0}, tmp_path / "plain")).model
    for layer in other.layers:
        layer.attention.scale = 1.5**2 * layer.attention.head_dim**-0.5
    np.testing.assert_allclose(found, other(ids), atol=TOLERANCE)
    assert np.abs(np.asarray(found) - reference(folder)[1]).max() > 5 * TOLERANCE


def test_dynamic_scaling_is_none_in_its_context(tmp_path: Path) -> None:
    plain = json.loads((FIXTURES / "qwen3" / "config.json").read_text("utf-8"))["rope_parameters"]
    folder = scaled(plain | {"rope_type": "dynamic", "factor": 4.0}, tmp_path)
    (ids,), expected = reference(folder)
    model = load(folder).model
    np.testing.assert_allclose(model(ids), expected, atol=TOLERANCE)
    longer = np.zeros((1, 65), np.int32)
    with pytest.raises(ValueError, match=r"at most 64 positions, .*; got 65"):
        model(longer)
    with pytest.raises(ValueError, match=r"at most 64 positions, .*; got 65"):
        model(ids, cache=model.init_cache(len(ids), 65))


def test_what_is_off_changes_nothing() -> None:
    """Keys that are not known, but null or false; and what only names or draws."""
    keys = {"alpha": None, "beta": False, "torch_dtype": "bfloat16", "temperature": 0.7}
    assert shape_of("llama3", **keys) == shape_of("llama3")
    windows = {"sliding_window": None, "use_sliding_window": False, "layer_types": ...}
    whole = shape_of("qwen3", **windows).variant
    assert (whole.window, whole.local_layers) == (None, ())
    assert shape_of("mistral", sliding_window=None).variant.local_layers == ()


def test_local_layers_need_a_window() -> None:
    with pytest.raises(RecipeError, match=r"config\.json: .*local layers need a window"):
        shape_of("gemma2", sliding_window=None)
    with pytest.raises(ValueError, match=r"local layers need a window; got layers \[0, 3\]"):
        DecoderConfig(local_layers=(0, 3))


@pytest.mark.peers
@pytest.mark.parametrize("kind", FAMILY)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    transformers = importlib.import_module("transformers")
    theirs = transformers.AutoConfig.for_model(kind).to_dict()
    path = Path("somewhere")
    assert family_shape({"model_type": kind}, path).model_dump() == (
        family_shape({k: v for k, v in theirs.items() if v is not None}, path).model_dump()
    )
