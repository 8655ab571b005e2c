"""Reading config.json: published files, older spellings, defaults, and errors."""

import functools
import importlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.config import RopeConfig
from recipes.errors import RecipeError
from recipes.hf import shape_of as read_shape
from recipes.hf.plain import attend, frequencies, rotate

from ..pretrained import FIXTURES

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published.json").read_text("utf-8")
)
"""The config.json of widely used checkpoints; of gemma-3-270m with its last two layers alone."""


LINEAR, LLAMA3 = (
    json.loads((FIXTURES / name / "config.json").read_text("utf-8"))["rope_parameters"]
    for name in ("llama2", "llama3")
)


def read(config: dict[str, Any], folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return read_shape(str(folder), "masked_lm" if "bert" in str(config["model_type"]) else "lm")


def shape_of(name: str, folder: Path, **changes: Any) -> Any:
    """Read the shape of a model with changed keys; Ellipsis removes a key."""
    keys = PUBLISHED.get(name) or json.loads((FIXTURES / name / "config.json").read_text("utf-8"))
    return read({k: v for k, v in (keys | changes).items() if v is not ...}, folder)


# width, layers, heads, heads of keys, size of a head, hidden, context, tied
DECODERS = {
    "llama-7b": (4096, 32, 32, 32, 128, 11008, 2048, False),
    "vicuna-7b-v1.5-16k": (4096, 32, 32, 32, 128, 11008, 4096, False),
    "Llama-3.2-1B-Instruct": (2048, 16, 32, 8, 64, 8192, 131072, True),
    "SmolLM2-135M-Instruct": (576, 30, 9, 3, 64, 1536, 8192, True),
    "Qwen2.5-0.5B": (896, 24, 14, 2, 64, 4864, 32768, True),
    "Qwen2.5-7B-Instruct, long": (3584, 28, 28, 4, 128, 18944, 32768, False),
    "Qwen3-0.6B": (1024, 28, 16, 8, 128, 3072, 40960, True),
    "Mistral-7B-v0.1": (4096, 32, 32, 8, 128, 14336, 32768, False),
    "gemma-2-9b": (3584, 42, 16, 8, 256, 14336, 8192, True),
    "gemma-3-270m": (640, 2, 4, 1, 256, 2048, 32768, True),
    "distilgpt2": (768, 6, 12, None, 64, 3072, 1024, True),
}
# width, layers, heads, hidden, positions that tokens can have
ENCODERS = {
    "bert-base-multilingual-cased": (768, 12, 12, 3072, 512),
    "distilroberta-base": (768, 6, 12, 3072, 512),
    "ModernBERT-base": (768, 22, 12, 1152, 8192),
    "mmBERT-base": (768, 22, 12, 1152, 8192),
}
# window, and how many layers have it
WINDOWS = {
    "Mistral-7B-v0.1": (4096, 32),
    "Qwen2.5-0.5B": (None, 0),
    "gemma-2-9b": (4096, 21),
    "gemma-3-270m": (512, 1),
    "ModernBERT-base": (65, 14),
}
# kind of scaling, base, factor, first context
ROPES = {
    "SmolLM2-135M-Instruct": ("none", 1e5, 1.0, 8192),
    "vicuna-7b-v1.5-16k": ("linear", 1e4, 4.0, 8192),
    "Llama-3.2-1B-Instruct": ("llama3", 5e5, 32.0, 8192),
    "Qwen2.5-7B-Instruct, long": ("yarn", 1e6, 4.0, 32768),
    "mmBERT-base": ("none", 1.6e5, 1.0, 8192),
}
# What older versions of transformers wrote into every file, and training and serving add.
INERT = {
    "auto_map": {"AutoTokenizer": ["tokenization_own.Tokenizer", None]},
    "bad_words_ids": None,
    "is_encoder_decoder": False,
    "length_penalty": 1.0,
    "num_beams": 4,
    "unknown": None,
}


def test_published_files(tmp_path: Path) -> None:
    assert PUBLISHED.keys() == DECODERS.keys() | ENCODERS.keys()
    for name in PUBLISHED:
        shape = shape_of(name, tmp_path)
        assert shape_of(name, tmp_path, **INERT) == shape, name
        size = (shape.width, shape.layers, shape.heads)
        if name in ENCODERS:
            assert (*size, shape.hidden, shape.longest) == ENCODERS[name], name
        else:
            size = (*size, shape.kv_heads, shape.head_dim, shape.hidden)
            assert (*size, shape.context, shape.tied_readout) == DECODERS[name], name
        if name in WINDOWS:
            own = shape.variant
            assert (own.window, len(own.local_layers)) == WINDOWS[name], name
        if name in ROPES:
            rope = shape.variant.rope
            found = rope.scaling, rope.base, rope.factor, rope.context
            assert found == ROPES[name], name


OLD_LLAMA3 = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
OLD_LINEAR = {"type": "linear", "factor": 2.0}
GONE = {"rope_parameters": ..., "layer_types": ...}
# fixture, keys as older versions of transformers wrote them
OLD: list[tuple[str, dict[str, Any]]] = [
    ("llama3", {"rope_parameters": ..., "rope_theta": 50.0, "rope_scaling": OLD_LLAMA3}),
    ("llama2", {"rope_parameters": ..., "rope_theta": 100, "rope_scaling": OLD_LINEAR}),
    ("llama2", {"rope_parameters": LINEAR | {"type": "linear"}, "head_dim": ...}),
    ("mistral", {"rope_parameters": ..., "rope_scaling": None, "head_dim": 6}),
    ("qwen2", {"layer_types": ...}),
    ("gemma2", {"layer_types": ..., "hidden_act": "gelu_pytorch_tanh", "rope_parameters": None}),
    (
        "modernbert-mlm",
        {"global_attn_every_n_layers": 3, "global_rope_theta": 100.0, "local_rope_theta": 20.0}
        | GONE
        | {"position_embedding_type": "absolute", "layer_norm_eps": 1e-5},
    ),
]


def test_older_spellings(tmp_path: Path) -> None:
    for name, keys in OLD:
        assert shape_of(name, tmp_path, **keys) == shape_of(name, tmp_path), name


FULL, LOCAL = "full_attention", "sliding_attention"
OLDEST = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 2.0, "truncate": False}
# fixture, keys, and what they change in the shape, or after a dot in its decoder
KEYS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gpt2", {"n_inner": None, "layer_norm_epsilon": 0.1}, {"mlp_ratio": 4.0, ".norm_eps": 0.1}),
    ("llama2", {"hidden_act": "gelu_new", "rms_norm_eps": 0.1}, {".activation": "gelu_tanh"}),
    ("llama2", {"mlp_bias": True}, {".biases": ("mlp",), ".attention_scale": None}),
    (
        "llama2",
        {"rope_parameters": LINEAR | {"rope_theta": 9.0, "attention_factor": 2.0}},
        {".rope.base": 9.0, ".rope.factor": 2.0, ".rope.attention_factor": 1.0},
    ),
    ("llama3", {"attention_bias": False}, {".biases": (), ".query_key_norms": False}),
    (
        "llama3",
        {"rope_parameters": LLAMA3 | {"low_freq_factor": 1.5, "high_freq_factor": 3, OLDEST: 32}},
        {".rope.low_factor": 1.5, ".rope.high_factor": 3, ".rope.context": 32},
    ),
    ("llama3", {"rope_parameters": LLAMA3 | {OLDEST: None}}, {".rope.context": 64}),
    (
        "qwen3",
        {"rope_parameters": YARN},
        {".rope.fast": 2.0, ".rope.slow": 1.0, ".rope.truncate": False, ".rope.context": 64}
        | {".rope.attention_factor": 0.1 * np.log(8) + 1},
    ),
    ("qwen3", {"rope_parameters": YARN | {"attention_factor": 2}}, {".rope.attention_factor": 2}),
    ("qwen3", {"rope_parameters": YARN | {"factor": 0.5}}, {".rope.attention_factor": 1.0}),
    ("mistral", {"sliding_window": 5}, {".window": 5, ".local_layers": (0, 1)}),
    ("mistral", {"sliding_window": None}, {".window": None, ".local_layers": ()}),
    ("qwen2", {"layer_types": [LOCAL, FULL]}, {".local_layers": (0,), ".biases": ("qkv",)}),
    ("qwen2", GONE | {"use_sliding_window": False}, {".local_layers": ()}),
    ("qwen2", GONE | {"max_window_layers": 0}, {".local_layers": (0, 1)}),
    ("qwen3", {}, {".query_key_norms": True, ".post_norms": False, ".norm_offset": False}),
    ("gemma2", {"hidden_activation": "silu"}, {".activation": "silu", ".query_key_norms": False}),
    ("gemma2", {"query_pre_attn_scalar": 16}, {".attention_scale": 0.25, ".norm_offset": True}),
    ("gemma2", {"attn_logit_softcapping": 0.6}, {".attention_cap": 0.6, ".post_norms": True}),
    ("gemma2", {"final_logit_softcapping": 3.0}, {".logit_cap": 3.0, ".embedding_scale": True}),
    ("gemma3", {"rope_parameters": {LOCAL: LINEAR}}, {".local_rope.factor": 2.0}),
    ("gemma3", {"rope_parameters": {LOCAL: LINEAR}}, {".rope.base": 1e6, ".rope.factor": 1.0}),
    ("gemma3", GONE | {"num_hidden_layers": 7}, {".local_layers": (0, 1, 2, 3, 4, 6)}),
    ("gemma3", GONE | {"rope_local_base_freq": 20.0}, {".local_rope.base": 20.0}),
    ("gemma3", {}, {".query_key_norms": True, "kv_heads": 2}),
    ("roberta-mlm", {"pad_token_id": 5}, {"padding": 5, "longest": 26}),
    ("roberta-mlm", {"pad_token_id": ...}, {"padding": 1}),
    (
        "roberta-mlm",
        {"hidden_act": "gelu_new"},
        {".activation": "gelu_tanh", "head_activation": "gelu"},
    ),
    ("bert-mlm", {"layer_norm_eps": 0.1}, {".norm_eps": 0.1, "longest": 32, "padding": None}),
    ("bert-mlm", {"hidden_act": "gelu_new"}, {"head_activation": "gelu_tanh", "modern": False}),
    ("bert-mlm", {"hidden_dropout_prob": 0.3}, {"segments": 2, "dropout": 0.3}),
    ("bert-classes", {"id2label": None, "num_labels": 7}, {"classes": 7, "labels": ()}),
    ("bert-classes", {"id2label": {"1": "b", "0": "a"}}, {"classes": 2, "labels": ("a", "b")}),
    ("bert-classes", {"id2label": {"1": "b", "2": "a"}}, {"classes": 2, "labels": ()}),
    ("modernbert-mlm", {"local_attention": 6}, {".window": 4, "longest": 32, "modern": True}),
    ("modernbert-mlm", {"layer_types": [FULL] * 3}, {".local_layers": (), ".window": None}),
    ("modernbert-mlm", {"classifier_activation": "silu"}, {"head_activation": "silu"}),
    ("modernbert-mlm", {"norm_eps": 0.1, "norm_bias": True}, {".norm_eps": 0.1, "norm_bias": True}),
    ("modernbert-mlm", {"decoder_bias": False}, {"readout_bias": False, "head_bias": True}),
    ("modernbert-mlm", {"mlp_dropout": 0.2, "mlp_bias": True}, {"dropout": 0.2}),
    ("modernbert-classes", {"classifier_pooling": "cls"}, {"pooling": "cls", "classes": 3}),
]


def test_every_key_counts(tmp_path: Path) -> None:
    for name, keys, expected in KEYS:
        shape = shape_of(name, tmp_path, **keys)
        for path, value in expected.items():
            own = shape.variant if path.startswith(".") else shape
            found = functools.reduce(getattr, path.strip(".").split("."), own)
            close = pytest.approx(value) if isinstance(value, float) else value
            assert found == close, (name, path)


CODE = {"AutoConfig": "configuration_bert.BertConfig"}
# a published model or a fixture, keys, and what the message has to name
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # keys that may change what is computed
    ("SmolLM2-135M-Instruct", {"rope_interleaved": True}, "rope_interleaved: .*True"),
    ("llama3", {"width": 8}, "width: .*unknown.*got 8"),
    ("bert-mlm", {"embedding_size": 128}, "embedding_size: .*unknown"),
    ("bert-mlm", {"auto_map": CODE}, "auto_map: .*'configuration_bert"),
    # values that no model here has
    ("gemma-3-270m", {"model_type": "gemma3"}, "model_type gpt2, llama, .*got 'gemma3'"),
    ("gpt2", {"activation_function": "relu"}, "activation_function: .*got 'relu'"),
    ("gpt2", {"n_embd": ...}, "n_embd: Field required"),
    ("gpt2", {"n_head": 3}, "heads must divide width; got heads 3"),
    ("gemma2", {"layer_types": [FULL]}, "layer_types of 2 layers; got 1"),
    ("gemma2", {"sliding_window": None}, "local layers need a window"),
    ("gemma2", {"use_bidirectional_attention": True}, "bidirectional_attention: .* got True"),
    ("bert-mlm", {"position_embedding_type": "relative_key"}, "got 'relative_key'"),
    # rotary positions
    ("llama2", {"rope_scaling": {"type": "yarn"}}, "rope_type yarn with factor"),
    ("llama2", {"rope_scaling": YARN | {"rope_type": "dynamic"}}, "scaling: .*got 'dynamic'"),
    ("llama2", {"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast .*got 0.5, 1.0 and 100"),
    ("llama3", {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "high_factor .*1.0 and 1"),
    ("llama3", {"rope_parameters": YARN | {"rope_type": "llama3"}}, "with high_freq_.*, low_freq"),
    ("gemma3", {"rope_parameters": {"rope_theta": 5.0}}, f"{FULL} and {LOCAL}; got rope_t"),
]


def test_what_is_refused(tmp_path: Path) -> None:
    for name, keys, message in REFUSED:
        with pytest.raises(RecipeError, match=rf"config\.json: .*{message}"):
            shape_of(name, tmp_path, **keys)


def yarn(size: int, base: float, context: int, given: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Compute YaRN's frequencies pair by pair, and the factor of queries and keys.

    In the paper, the ramp is linear in a pair's number of rotations in the context; in its code and
    in `transformers`, in the index of the pair, between beta_fast and beta_slow rotations.
    """
    factor, context = given["factor"], given.get("original_max_position_embeddings", context)
    ends = []
    for turns in (given.get("beta_fast", 32), given.get("beta_slow", 1)):
        wavelength = context / turns  # of the pair i with 2 pi base^(2 i / size) = wavelength
        ends.append(size / 2 * np.log(wavelength / (2 * np.pi)) / np.log(base))
    if given.get("truncate", True):
        ends = [np.floor(ends[0]), np.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], size - 1)
    found = []
    for pair in range(size // 2):
        ramp = 1.0 if pair <= first else 0.0 if pair >= last else (last - pair) / (last - first)
        frequency = base ** (-2 * pair / size)
        found.append((1 - ramp) * frequency / factor + ramp * frequency)
    return np.asarray(found), given.get("attention_factor", 0.1 * np.log(factor) + 1)


SCALINGS: list[dict[str, Any]] = [
    {"factor": 4.0, "original_max_position_embeddings": 32768},  # Qwen's
    {"factor": 4, "rope_theta": 500.0},
    {"factor": 8.0, "beta_fast": 16, "beta_slow": 2},
    {"factor": 8.0, "truncate": False, "attention_factor": 1.5},
]


def test_yarn(tmp_path: Path) -> None:
    for given in SCALINGS:
        own = {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **given}}
        rope = shape_of("llama-7b", tmp_path, **own).variant.rope
        for size in (64, 128):
            expected, attention = yarn(size, given.get("rope_theta", 1e6), 2048, given)
            found = frequencies(size, rope)
            np.testing.assert_allclose(found, expected, rtol=1e-6)
            assert rope.attention_factor == pytest.approx(attention, rel=1e-12)
            share = found / frequencies(size, RopeConfig(base=rope.base))
            kept, divided = np.isclose(share, 1), np.isclose(share, 1 / given["factor"])
            assert all(band.any() for band in (kept, divided, ~kept & ~divided))
    # No pair completes a rotation in these contexts; as in `transformers`, the first is kept.
    for context, share in ((6, 1 / 8), (2, 1.0)):
        rope = RopeConfig(base=10.0, scaling="yarn", factor=8.0, context=context)
        found = frequencies(8, rope) / frequencies(8, RopeConfig(base=10.0))
        np.testing.assert_allclose(found, [1, share, share, share], rtol=1e-6)


def test_llama3_frequencies() -> None:
    """Compare with the formula in terms of wavelengths, as in the model's published code."""
    rope = RopeConfig(base=50.0, scaling="llama3", factor=8.0, context=64)
    wavelengths = 2 * np.pi * 50.0 ** (np.arange(0, 16, 2) / 16)
    smooth = (64 / wavelengths - rope.low_factor) / (rope.high_factor - rope.low_factor)
    smooth = np.clip(smooth, 0, 1)
    assert {0, 1} < set(smooth), "all three bands"
    expected = 2 * np.pi / wavelengths * ((1 - smooth) / 8 + smooth)
    np.testing.assert_allclose(frequencies(16, rope), expected, rtol=1e-6)


def test_rotation_and_attention_in_float16() -> None:
    """Both compute in float32; the attention factor multiplies rotated features."""
    draw = np.random.default_rng(0)
    q, k, v = (jnp.asarray(draw.standard_normal((2, 3, 2, 8)), jnp.float16) for _ in range(3))
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    places, turn = jnp.asarray([0, 5, 17]), frequencies(8, RopeConfig())
    turned = jax.jit(lambda x, factor: rotate(x, places, turn, factor), static_argnums=1)
    half = turned(q, 1)
    np.testing.assert_array_equal(half, turned(wide[0], 1).astype(jnp.float16))
    assert half.dtype == jnp.float16
    np.testing.assert_allclose(turned(wide[0], 1.5), 1.5 * turned(wide[0], 1), rtol=1e-5)
    options: dict[str, Any]
    for options in ({"is_causal": True}, {"cap": 0.7, "mask": jnp.ones((1, 1, 3, 3), bool)}):
        run = jax.jit(lambda *arrays, options=options: attend(*arrays, **options))
        np.testing.assert_array_equal(run(q, k, v), run(*wide).astype(jnp.float16))


SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "num_key_value_heads", "head_dim"),
    *("n_embd", "n_layer", "n_head", "n_positions", "model_type"),
}
KINDS = "llama mistral qwen2 qwen3 gemma2 gemma3_text gpt2 bert roberta modernbert"


@pytest.mark.peers
@pytest.mark.parametrize("kind", KINDS.split())
def test_defaults_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    transformers = importlib.import_module("transformers")
    theirs = transformers.AutoConfig.for_model(kind).to_dict()
    given = {name: value for name, value in theirs.items() if value is not None}
    own = read({name: given[name] for name in SIZES & given.keys()}, tmp_path)
    labels = {"labels"}
    assert read(given, tmp_path).model_dump(exclude=labels) == own.model_dump(exclude=labels)
