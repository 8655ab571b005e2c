"""Folders that are not what they should be: each message says what is wrong, and where."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from recipes.errors import RecipeError
from recipes.hf import load, save
from tests.recipes.pretrained import FIXTURES, WEIGHTS, change_config, change_tensors, copied

SHARDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def rename(folder: Path, old: str, new: str) -> None:
    (folder / old).rename(folder / new)


def without(*names: str) -> Callable[[Path], None]:
    def drop(old):
        assert old.keys() >= set(names)
        return {name: array for name, array in old.items() if name not in names}

    return lambda folder: change_tensors(folder, drop)


def with_tensor(name: str, array: np.ndarray) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda old: old | {name: array})


def config(**changes) -> Callable[[Path], None]:
    return lambda folder: change_config(folder, **changes)


def rope(**values) -> Callable[[Path], None]:
    return config(rope_parameters=values)


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content, "utf-8")


def index(**changes: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text("utf-8"))
        assert content["weight_map"].keys() & changes.keys()
        content["weight_map"] |= changes
        (folder / INDEX).write_text(json.dumps(content), "utf-8")

    return change


def cut_short(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-4])


def in_float8(folder: Path) -> None:
    """A file whose header names a type that is not one of NumPy's or ours."""
    path = folder / WEIGHTS
    header = {"x": {"dtype": "F8_E4M3FNUZ", "shape": [1], "data_offsets": [0, 1]}}
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0")


LINEAR = "transformer.h.0.mlp.c_fc.weight"
NORM = "bert.encoder.layer.1.output.LayerNorm.bias"
QUERY_NORM = "model.layers.1.self_attn.q_norm.weight"
THIRDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
DENSE = "bert.encoder.layer.0.attention.self.key.weight"
# folder, what is wrong with it, the message
MISTAKES = [
    # config.json
    (
        "gpt2",
        lambda folder: (folder / "config.json").unlink(),
        r"with config\.json; got one without; name another",
    ),
    ("gpt2", text("config.json", "{"), r"config\.json: expected JSON; got Expecting"),
    ("gpt2", text("config.json", "[1]"), r"config\.json: expected a JSON object; got list"),
    ("gpt2", config(model_type="t5"), r"expected model_type gpt2, llama, .*bert.*; got 't5'"),
    ("gpt2", config(model_type=None), r"expected model_type gpt2, llama, .*bert.*; got None"),
    (
        "llama3",
        config(architectures=["LlamaForSequenceClassification"]),
        r"CausalLM; got 'Ll",
    ),
    (
        "gpt2",
        config(architectures=["GPT2ForSequenceClassification"]),
        r"expected an architecture of GPT2Model, GPT2LMHeadModel; got 'GPT2ForSeq",
    ),
    (
        "bert-mlm",
        config(architectures=["BertModel"]),
        r"with a task; got 'BertModel'; choose the task",
    ),
    ("bert-mlm", config(architectures=None), r"with a task; got None; choose the task"),
    ("gpt2", config(activation_function="relu"), r"activation_function: expected .*; got 'relu'"),
    ("gpt2", config(scale_attn_by_inverse_layer_idx=True), r"inverse_layer_idx: .*; got True"),
    ("bert-mlm", config(position_embedding_type="relative_key"), r"got 'relative_key'"),
    ("bert-mlm", config(is_decoder=True), r"is_decoder: expected False; got True"),
    ("bert-mlm", config(hidden_size="16"), r"hidden_size: expected a valid integer; got '16'"),
    ("gpt2", config(n_head=3), r"config\.json: .*heads must divide width; got heads 3"),
    ("bert-mlm", config(num_attention_heads=3), r"attention_heads that divide hidden_size; got 3"),
    ("llama3", config(num_key_value_heads=3), r"kv_heads must divide heads; got kv_heads 3"),
    ("qwen3", config(head_dim=5), r"rope needs an even head size .* a head size of 5"),
    ("gemma2", config(layer_types=["full_attention"]), r"layer_types of 2 layers; got 1; correct"),
    ("gemma2", config(use_bidirectional_attention=True), r"bidirectional_attention: .* got True"),
    ("gemma3", config(attn_logit_softcapping=5.0), r"attn_logit_softcapping: expected None; got 5"),
    ("mistral", config(hidden_act="relu"), r"hidden_act: expected .*'silu'.*; got 'relu'"),
    ("roberta-mlm", config(pad_token_id=31), r"pad_token_id below .*; got 31 and 32; correct"),
    ("modernbert-mlm", config(local_attention=0), r"local_attention: expected greater than 0"),
    ("modernbert-mlm", config(layer_types=["full_attention"]), r"layer_types of 3 layers; got 1"),
    # keys that may change what is computed
    ("llama3", config(sliding_window=8), r"config\.json: sliding_window: expected no key .*got 8,"),
    (
        "qwen2",
        config(quantization_config={"bits": 4}),
        r"quantization_config: .*; if it does",
    ),
    ("mistral", config(layer_types=["full_attention"] * 2), r"layer_types: expected no key"),
    ("llama3", rope(rope_type="longrope"), r"rope_parameters\.rope_type: .*; got 'longrope'"),
    (
        "llama3",
        rope(rope_type="yarn", factor=2.0, beta_fast=0.5),
        r"config\.json: .*beta_fast of at least its beta_slow, .*; got 0\.5, 1\.0 and 10000\.0",
    ),
    ("llama3", rope(rope_type="llama3", factor=2.0), r"llama3 with low_freq_factor, high_freq_fa"),
    ("llama3", rope(partial_rotary_factor=0.5), r"partial_rotary_factor: expected no such key"),
    ("gemma3", rope(rope_theta=5.0), r"expected full_attention and sliding_attention; got rope_th"),
    ("modernbert-mlm", rope(whole={}), r"expected full_attention and sliding_attention; got whole"),
    ("modernbert-mlm", config(sliding_window=8), r"sliding_window: expected no key"),
    # which files
    (
        "gpt2",
        lambda folder: rename(folder, WEIGHTS, "pytorch_model.bin"),
        r"expected model\.safetensors; got the pickle file pytorch_model\.bin, which can run any",
    ),
    (
        "gpt2",
        lambda folder: (folder / WEIGHTS).unlink(),
        r"expected model\.safetensors, or .*; got neither",
    ),
    ("gpt2", cut_short, r"model\.safetensors: expected a safetensors file; got .*; copy the file"),
    ("gpt2", in_float8, r"expected types such as F32, F16 and BF16; got 'F8_E4M3FNUZ'"),
    ("bert-qa", text(INDEX, "{}"), r"index\.json: expected weight_map.*; got None"),
    ("bert-qa", lambda folder: (folder / SHARDS[1]).unlink(), r"beside it; got 'model-00002-of"),
    ("bert-qa", index(**{NORM: "../weights.safetensors"}), r"beside it; got '\.\./weights"),
    (
        "bert-qa",
        index(**{"qa_outputs.bias": SHARDS[0]}),
        r"got qa_outputs\.bias in model\.safetensors\.index\.json, but not model-00001-of-00002",
    ),
    ("llama2", lambda folder: (folder / THIRDS[2]).unlink(), r"beside it; got 'model-00003-of"),
    # tensors
    ("qwen3", without(QUERY_NORM), r"layers\.1\.self_attn\.q_norm\.weight missing"),
    (
        "qwen2",
        config(model_type="llama", architectures=None),
        r"layer_types: .*; got \['full",
    ),
    ("llama3", config(attention_bias=False), r"q_proj\.bias, .* more extra"),
    (
        "mistral",
        config(tie_word_embeddings=True),
        r"lm_head\.weight and model\.embed_tokens\S+ ",
    ),
    ("gpt2", without(LINEAR), r"every tensor of the model; transformer\.h\.0\.mlp\.c_fc.* missing"),
    ("bert-mlm", without("cls.predictions.bias"), r"cls\.predictions\.bias missing"),
    ("roberta-mlm", without("lm_head.bias"), r"lm_head\.bias missing"),
    ("bert-classes", without("classifier.bias"), r"classifier\.bias missing"),
    ("gpt2", config(n_layer=1), r"transformer\.h\.1\.\S+, .* and 8 more extra; give the config"),
    ("gpt2", config(n_layer=3), r"transformer\.h\.2\.\S+, .* and 8 more missing"),
    ("gpt2", with_tensor("adapter.weight", np.ones(1, np.float32)), r"adapter\.weight extra"),
    ("gpt2", config(n_inner=64), r"c_fc\.bias must be \[64\] of float32.*; got \[40\] of float32"),
    ("bert-mlm", with_tensor(DENSE, np.ones((16, 2), np.float32)), r"\[16, 16\].*got \[16, 2\]"),
    ("gpt2", with_tensor(LINEAR, np.ones((16, 40), np.int32)), r"got \[16, 40\] of int32"),
    (
        "gpt2",
        with_tensor("lm_head.weight", np.ones((300, 16), np.float32)),
        r"(?s)expected lm_head\.weight and transformer\.wte\.weight to be equal, as they are tied",
    ),
]


@pytest.mark.parametrize(
    ("name", "change", "message"), MISTAKES, ids=[message[-40:] for *_, message in MISTAKES]
)
def test_what_is_wrong_is_named(name: str, change, message: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    change(folder)
    with pytest.raises(RecipeError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"expected a folder .*; got nothing"):
        load(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match=r"expected a folder .*; got a file"):
        load(tmp_path / "file")


def test_a_task_of_another_model() -> None:
    with pytest.raises(RecipeError, match=r"expected a task of gpt2, lm; got 'masked_lm'"):
        load(FIXTURES / "gpt2", "masked_lm")
    with pytest.raises(RecipeError, match=r"expected a task of bert, masked_lm or .*; got 'lm'"):
        load(FIXTURES / "bert-qa", "lm")


def test_pickles_beside_safetensors_are_not_read(tmp_path: Path) -> None:
    folder = copied("gpt2", tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    assert load(folder).task == "lm"


def test_shards_left_over_are_not_read(tmp_path: Path) -> None:
    folder = copied("gpt2", tmp_path)
    (folder / INDEX).write_text("{}", "utf-8")
    save(load(folder), tmp_path / "new")
    assert not (tmp_path / "new" / INDEX).exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    pretrained = load(FIXTURES / "gpt2")
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match=r"cannot write .*file: File exists; give a folder"):
        save(pretrained, tmp_path / "file")


def test_headers_of_other_writers_are_kept(tmp_path: Path) -> None:
    """Another order and a padded header, as the writers of other languages leave them."""
    folder = copied("gpt2", tmp_path)
    path = folder / WEIGHTS
    tensors = safetensors.numpy.load_file(str(path))
    described, start = {"__metadata__": {"b": "1", "a": "2"}}, 0
    for name in sorted(tensors, reverse=True):
        end = start + tensors[name].nbytes
        shape = list(tensors[name].shape)
        described[name] = {"data_offsets": [start, end], "shape": shape, "dtype": "F32"}
        start = end
    header = json.dumps(described, indent=1).encode() + b"   "
    raw = b"".join(tensors[name].tobytes() for name in sorted(tensors, reverse=True))
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw)
    save(load(folder), tmp_path / "new")
    assert (tmp_path / "new" / WEIGHTS).read_bytes() == path.read_bytes()
    assert [file.name for file in (tmp_path / "new").glob("*.partial")] == []


def test_new_files_are_those_of_the_library(tmp_path: Path) -> None:
    """A file with a new head has the bytes that the safetensors library would write."""
    save(load(FIXTURES / "bert-mlm", "classification", new_head=True), tmp_path)
    written = tmp_path / WEIGHTS
    tensors = safetensors.numpy.load_file(str(written))
    again = tmp_path / "again.safetensors"
    safetensors.numpy.save_file(tensors, str(again), {"format": "pt"})
    assert again.read_bytes() == written.read_bytes()


def test_ids_that_end_a_text(tmp_path: Path) -> None:
    folder = copied("llama3", tmp_path)
    assert load(folder).source.ends == (0,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}', "utf-8")
    assert load(folder).source.ends == (7, 9)
    (folder / "generation_config.json").unlink()
    change_config(folder, eos_token_id=None)
    assert load(folder).source.ends == ()
