"""The config.json of published folders is read; what changes the model and is not there is not."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.errors import RecipeError
from recipes.hf._config import SHAPES, model_type, task_of
from tests.recipes.hf.published import TEXTS

PLACE = Path("folder")


def read(name: str, **changes: Any) -> Any:
    """The shape in a published config.json with other keys."""
    keys = json.loads(TEXTS[name]) | changes
    task_of(keys, None, PLACE)
    return SHAPES[model_type(keys, PLACE)](keys, PLACE)


# name: width, layers, heads, heads of keys, size of a head, hidden, context, tied
DECODERS = {
    "llama-7b": (4096, 32, 32, 32, 128, 11008, 2048, False),
    "Llama-2-70b-hf": (8192, 80, 64, 8, 128, 28672, 4096, False),
    "vicuna-7b-v1.5-16k": (4096, 32, 32, 32, 128, 11008, 4096, False),
    "CodeLlama-34b-hf": (8192, 48, 64, 8, 128, 22016, 16384, False),
    "TinyLlama-1.1B-Chat-v1.0": (2048, 22, 32, 4, 64, 5632, 2048, False),
    "Meta-Llama-3-8B": (4096, 32, 32, 8, 128, 14336, 8192, False),
    "Llama-3.2-1B-Instruct": (2048, 16, 32, 8, 64, 8192, 131072, True),
    "SmolLM2-135M-Instruct": (576, 30, 9, 3, 64, 1536, 8192, True),
    "Qwen2.5-0.5B": (896, 24, 14, 2, 64, 4864, 32768, True),
    "Qwen2.5-7B-Instruct, long": (3584, 28, 28, 4, 128, 18944, 32768, False),
    "Qwen3-0.6B": (1024, 28, 16, 8, 128, 3072, 40960, True),
    "Mistral-7B-v0.1": (4096, 32, 32, 8, 128, 14336, 32768, False),
    "Mistral-7B-v0.3": (4096, 32, 32, 8, 128, 14336, 32768, False),
    "gemma-2-9b": (3584, 42, 16, 8, 256, 14336, 8192, True),
    "gemma-3-270m": (640, 2, 4, 1, 256, 2048, 32768, True),
    "gpt2-large": (1280, 36, 20, None, 64, 5120, 1024, True),
    "distilgpt2": (768, 6, 12, None, 64, 3072, 1024, True),
}
# name: width, layers, heads, hidden, positions that tokens can have
ENCODERS = {
    "bert-base-uncased": (768, 12, 12, 3072, 512),
    "bert-base-multilingual-cased": (768, 12, 12, 3072, 512),
    "distilroberta-base": (768, 6, 12, 3072, 512),
    "ModernBERT-base": (768, 22, 12, 1152, 8192),
    "mmBERT-base": (768, 22, 12, 1152, 8192),
}


def test_all_are_read() -> None:
    assert TEXTS.keys() == DECODERS.keys() | ENCODERS.keys()


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str) -> None:
    shape = read(name)
    size = (shape.width, shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.hidden)
    assert (*size, shape.context, shape.tied_readout) == DECODERS[name]


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name: str) -> None:
    shape = read(name)
    size = shape.width, shape.layers, shape.heads, shape.hidden
    assert (*size, shape.longest) == ENCODERS[name]


# name, the window, how many layers have it
WINDOWS = [
    ("Mistral-7B-v0.1", 4096, 32),
    ("Mistral-7B-v0.3", None, 0),
    ("Qwen2.5-0.5B", None, 0),
    ("gemma-2-9b", 4096, 21),
    ("gemma-3-270m", 512, 1),
    ("ModernBERT-base", 65, 14),
]


@pytest.mark.parametrize(("name", "window", "layers"), WINDOWS)
def test_windows(name: str, window: int | None, layers: int) -> None:
    own = read(name).variant
    assert (own.window, len(own.local_layers)) == (window, layers)


# name, kind of scaling, base, factor, first context
ROPES = [
    ("SmolLM2-135M-Instruct", "none", 1e5, 1.0, 8192),
    ("vicuna-7b-v1.5-16k", "linear", 1e4, 4.0, 8192),
    ("Llama-3.2-1B-Instruct", "llama3", 5e5, 32.0, 8192),
    ("Qwen2.5-7B-Instruct, long", "yarn", 1e6, 4.0, 32768),
    ("mmBERT-base", "none", 1.6e5, 1.0, 8192),
]


@pytest.mark.parametrize(("name", "scaling", "base", "factor", "context"), ROPES)
def test_rotary_positions(
    name: str, scaling: str, base: float, factor: float, context: int
) -> None:
    rope = read(name).variant.rope
    assert (rope.scaling, rope.base, rope.factor, rope.context) == (scaling, base, factor, context)


# What older versions of transformers wrote into every file, and training and serving add.
INERT = {
    "_commit_hash": "d5b10f7",
    "_num_labels": 2,
    "auto_map": {"AutoTokenizer": ["tokenization_own.Tokenizer", None]},
    "bad_words_ids": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "finetuning_task": "mnli",
    "gradient_checkpointing": True,
    "is_encoder_decoder": False,
    "length_penalty": 1.0,
    "neftune_noise_alpha": 5,
    "num_beams": 1,
    "output_attentions": True,
    "prefix": "",
    "problem_type": "single_label_classification",
    "pruned_heads": {},
    "repetition_penalty": 1.05,
    "sentence_transformers": {"version": "4.1.0"},
    "suppress_tokens": [],
    "unsloth_version": "2025.3.3",
    "use_bfloat16": False,
}


@pytest.mark.parametrize(
    "name", ["Qwen3-0.6B", "gemma-2-9b", "gpt2-large", "bert-base-uncased", "ModernBERT-base"]
)
def test_what_changes_nothing(name: str) -> None:
    assert read(name, **INERT) == read(name)


CODE = {"AutoConfig": "configuration_bert.BertConfig"}
# name, keys that change the model, the message
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma-2-9b", {"sliding_window_size": 512}, r"_size: expected sliding_window, 4096; got 512"),
    ("gemma-2-9b", {"sliding_window": 512}, r"expected sliding_window, 512; got 4096; correct"),
    ("SmolLM2-135M-Instruct", {"rope_interleaved": True}, r"rope_interleaved: .*; got True"),
    ("Mistral-7B-v0.1", {"rope_interleaved": True}, r"rope_interleaved: expected no key .* True"),
    ("Qwen2.5-0.5B", {"use_mrope": True}, r"use_mrope: expected no key .*; got True"),
    (
        "Qwen2.5-0.5B",
        {"dual_chunk_attention_config": {"chunk_size": 8}},
        r"dual_chunk_.*'chunk_size'",
    ),
    ("Qwen3-0.6B", {"quantization_config": {"bits": 3}}, r"quantization_config: .*'bits': 3"),
    ("Llama-2-70b-hf", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor: .*; got 0\.5"),
    ("Llama-2-70b-hf", {"pruned_heads": {"0": [1]}}, r"pruned_heads: expected no key .*'0'"),
    ("Llama-2-70b-hf", {"rope_scaling": {"type": "longrope"}}, r"rope_type: .*; got 'longrope'"),
    ("Llama-2-70b-hf", {"rope_scaling": {"type": "yarn"}}, r"expected rope_type yarn with factor"),
    (
        "Llama-2-70b-hf",
        {"rope_scaling": {"type": "yarn", "factor": 16.0, "finetuned": True}},
        r"rope_scaling\.finetuned: expected no such key; got True",
    ),
    ("bert-base-uncased", {"auto_map": CODE}, r"auto_map: expected no code .*'configuration_bert"),
    ("gpt2-large", {"auto_map": {"AutoModel": "own.GPT"}}, r"auto_map: .*'own.GPT'.*remove auto_m"),
    ("Qwen3-0.6B", {"auto_map": CODE}, r"auto_map: expected no code for the model"),
    ("ModernBERT-base", {"position_embedding_type": "alibi"}, r"_type: expected .*; got 'alibi'"),
    ("ModernBERT-base", {"rope_scaling": {"type": "yarn"}}, r"rope_scaling: expected None; got"),
    ("gpt2-large", {"multi_query": True}, r"multi_query: expected no key .*; got True"),
    ("bert-base-uncased", {"embedding_size": 128}, r"embedding_size: expected no key .*; got 128"),
    ("gemma-3-270m", {"model_type": "gemma3"}, r"expected model_type .*; got 'gemma3'; no other"),
    ("gemma-2-9b", {"model_type": "gemma"}, r"expected model_type .*; got 'gemma'; no other"),
]


@pytest.mark.parametrize(
    ("name", "keys", "message"), REFUSED, ids=[message[-30:] for *_, message in REFUSED]
)
def test_what_is_refused(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        read(name, **keys)
