"""Models from Hugging Face folders: the logits of `transformers`, the same files back, mistakes.

The folders in `pretrained_fixtures` are those of `make_pretrained_fixtures.py`.
"""

import functools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from recipes.errors import RecipeError
from recipes.hf import Bert, Pretrained, labels_in, load, save
from tests.recipes import make_pretrained_fixtures as fixtures
from tests.recipes.pretrained import (
    FIXTURES,
    FOLDERS,
    SHARDS,
    WEIGHTS,
    change_config,
    change_tensors,
    copied,
    reference,
)
from unitscale import as_scaled

# Differences of float32 sums in another order; a figure of the project.
TOLERANCE = 1e-4
INDEX = "model.safetensors.index.json"


@functools.cache
def loaded(name: str) -> Pretrained:
    return load(FIXTURES / name)


@nnx.jit
def logits(model: Any, *inputs: np.ndarray) -> jax.Array:
    return model(*inputs)


def same_parameters(one: Pretrained, other: Pretrained) -> None:
    leaves = (jax.tree.leaves(each.params) for each in (one, other))
    for found, expected in zip(*leaves, strict=True):
        np.testing.assert_array_equal(found, expected)


def same_files(one: Path, other: Path) -> set[str]:
    """Names of the files of the second folder, all equal to those of the first."""
    names = {file.name for file in other.iterdir()}
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    return names


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_those_of_transformers(name: str) -> None:
    inputs, expected = reference(FIXTURES / name)
    found = logits(loaded(name).model, *inputs)
    assert found.dtype == np.float32
    assert np.abs(expected).max() > 1e3 * TOLERANCE, "the comparison can fail"
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_same_files_are_written(name: str, tmp_path: Path) -> None:
    save(loaded(name), tmp_path / "new")
    written = same_files(FIXTURES / name, tmp_path / "new")
    assert written >= {"config.json", "tokenizer.json"}
    assert len([file for file in written if file.endswith("s")]) == SHARDS.get(name, 1)
    save(loaded(name), tmp_path / "new", as_scaled(loaded(name).params))
    assert same_files(FIXTURES / name, tmp_path / "new") == written


@pytest.mark.parametrize("name", ["bert-classes", "roberta-classes", "modernbert-classes"])
def test_what_is_padding_changes_nothing(name: str) -> None:
    model = loaded(name).model
    (ids, segments, mask), expected = reference(FIXTURES / name)
    other = np.where(mask == 1, ids, (ids + 7) % 100)
    np.testing.assert_allclose(logits(model, other, segments, mask), expected, atol=TOLERANCE)
    assert np.abs(logits(model, other, segments, mask * 0 + 1) - expected).max() > TOLERANCE
    if name == "bert-classes":
        assert np.abs(logits(model, ids, segments * 0, mask) - expected).max() > TOLERANCE


@pytest.mark.parametrize(
    "folder",
    ["llama3", "gemma3", *(pytest.param(x, marks=pytest.mark.slow) for x in ("mistral", "gemma2"))],
)
def test_cached_logits_are_the_uncached_ones(folder: str) -> None:
    """A prompt, then a token at a time, past the window."""
    (ids,), expected = reference(FIXTURES / folder)
    graphdef, state = nnx.split(loaded(folder).model)
    step = jax.jit(lambda state, ids, cache: nnx.merge(graphdef, state)(ids, cache=cache))
    cache = nnx.merge(graphdef, state).init_cache(len(ids), ids.shape[1] + 1)
    pieces = []
    for piece in np.split(ids, [4, 5, 6, 7, 8, 9, 10], axis=1):
        out, cache = step(state, jnp.asarray(piece), cache)
        pieces.append(out)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), expected, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types_of_the_file_are_kept(dtype: str, tmp_path: Path) -> None:
    folder = copied("gpt2", tmp_path)
    change_tensors(folder, lambda old: {k: jnp.asarray(v, dtype) for k, v in old.items()})
    half, wide = load(folder), load(folder, param_dtype=jnp.float32)
    for pretrained, kept in ((half, dtype), (wide, "float32")):
        assert {leaf.dtype for leaf in jax.tree.leaves(pretrained.params)} == {jnp.dtype(kept)}
        save(pretrained, tmp_path / "new")
        assert same_files(folder, tmp_path / "new") >= {WEIGHTS}
    save(half, folder)  # over itself
    assert same_files(folder, tmp_path / "new")


def bare_llama(old: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The names of a model without a head, and the buffers of the first Llamas."""
    new = {name.removeprefix("model."): array for name, array in old.items()}
    return new | {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}


def bare_gpt2(old: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The names of GPT-2's first files: no "transformer." and a mask in every layer."""
    new = {name.removeprefix("transformer."): array for name, array in old.items()}
    new["h.0.attn.bias"] = np.tril(np.ones((1, 1, 32, 32), np.float32))
    return new | {"h.1.attn.masked_bias": np.float32(-1e4)}


def old_bert(old: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The names of BERT's first files, its unused head, and tensors that are tied twice over."""
    norms = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    new = {}
    for name, array in old.items():
        end = ".".join(name.split(".")[-2:])
        new[name.removesuffix(end) + norms.get(end, end)] = array
    new["bert.embeddings.position_ids"] = np.arange(32)[None].astype(np.int32)
    new["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"]
    new["cls.predictions.decoder.bias"] = old["cls.predictions.bias"]
    return new | {"cls.seq_relationship.weight": np.ones((2, 16), np.float32)}


def bare_bert(old: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    new = {name.removeprefix("bert."): array for name, array in old.items()}
    return new | {"embeddings.position_ids": np.arange(32)[None].astype(np.int32)}


@pytest.mark.parametrize(
    ("name", "change", "unused"),
    [
        ("gpt2", bare_gpt2, ()),
        ("llama3", bare_llama, ()),
        ("bert-mlm", old_bert, ("cls.seq_relationship.weight",)),
        ("bert-mlm", bare_bert, ()),
    ],
)
def test_files_of_old_versions(name: str, change, unused: tuple[str, ...], tmp_path: Path) -> None:
    """They hold the same parameters, and come out as they were."""
    folder = copied(name, tmp_path)
    change_tensors(folder, change)
    pretrained = load(folder)
    assert pretrained.unused == unused
    same_parameters(pretrained, loaded(name))
    save(pretrained, tmp_path / "new")
    same_files(folder, tmp_path / "new")


@pytest.mark.parametrize("name", ["gpt2", "bert-mlm"])
def test_a_readout_of_its_own(name: str, tmp_path: Path) -> None:
    folder, gpt = copied(name, tmp_path), name == "gpt2"
    change_config(folder, tie_word_embeddings=False)
    table = "transformer.wte.weight" if gpt else "bert.embeddings.word_embeddings.weight"
    readout = "lm_head.weight" if gpt else "cls.predictions.decoder.weight"
    change_tensors(folder, lambda old: old | {readout: -old[table]})
    inputs, expected = reference(folder)
    shift = 0.0 if gpt else 2 * np.asarray(loaded(name).model.bias[...])
    pretrained = load(folder)
    found = logits(pretrained.model, *inputs)
    np.testing.assert_allclose(found, shift - expected, rtol=0, atol=TOLERANCE)
    save(pretrained, tmp_path / "new")
    same_files(folder, tmp_path / "new")


# folder, tensors that a new head for five classes draws, and how the unused ones begin
HEADS = {
    "bert-mlm": ("bert.pooler.dense classifier", "cls.predictions."),
    "roberta-mlm": ("classifier.dense classifier.out_proj", "lm_head."),
    "modernbert-mlm": ("classifier", "decoder.bias"),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_new_head(name: str, tmp_path: Path) -> None:
    drawn, unused = HEADS[name]
    drawn = {f"{module}.{part}" for module in drawn.split() for part in ("weight", "bias")}
    with pytest.raises(RecipeError, match=rf"task classification; got none of {min(drawn)[:9]}"):
        load(FIXTURES / name, "classification")
    pretrained = load(FIXTURES / name, "classification", new_head=True, classes=5)
    assert set(pretrained.drawn) == drawn
    assert all(one.startswith(unused) for one in pretrained.unused)
    save(pretrained, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert config["architectures"][0].endswith("ForSequenceClassification")
    assert len(config["id2label"]) == len(config["label2id"]) == 5
    again = load(tmp_path)
    assert (again.task, again.drawn, again.unused) == ("classification", (), ())
    same_parameters(again, pretrained)
    inputs, _ = reference(FIXTURES / name)
    assert nnx.eval_shape(logits, again.model, *inputs).shape == (len(inputs[0]), 5)
    tensors = safetensors.numpy.load_file(tmp_path / WEIGHTS)  # which writes the same bytes
    assert safetensors.numpy.save(tensors, {"format": "pt"}) == (tmp_path / WEIGHTS).read_bytes()
    for source in (pretrained, again):  # a head that is new, and one that was there
        save(source, tmp_path / "named", labels="edcba")
        config = json.loads((tmp_path / "named" / "config.json").read_text("utf-8"))
        assert labels_in(str(tmp_path / "named")) == tuple("edcba")
        assert config["label2id"] == {"e": 0, "d": 1, "c": 2, "b": 3, "a": 4}
    with pytest.raises(RecipeError, match="classes to be None or that of the folder; got 4"):
        load(tmp_path, classes=4)


@pytest.mark.parametrize(
    ("name", "module"), [("roberta-mlm", "qa_outputs"), ("modernbert-mlm", "classifier")]
)
def test_a_new_head_for_answers(name: str, module: str, tmp_path: Path) -> None:
    pretrained = load(FIXTURES / name, "question_answering", new_head=True)
    assert pretrained.drawn == (f"{module}.weight", f"{module}.bias")
    save(pretrained, tmp_path)
    again = load(tmp_path)
    assert again.task == "question_answering"
    same_parameters(again, pretrained)


def test_a_new_classifier_on_a_pooler_that_is_there(tmp_path: Path) -> None:
    folder = copied("bert-classes", tmp_path)
    change_tensors(folder, lambda old: {k: v for k, v in old.items() if "classifier" not in k})
    with pytest.raises(RecipeError, match=r"got none of classifier\.weight, classifier\.bias; "):
        load(folder)
    pretrained = load(folder, new_head=True, classes=4)
    assert pretrained.drawn == ("classifier.weight", "classifier.bias")
    kept = loaded("bert-classes").model.pooler.kernel[...]
    np.testing.assert_array_equal(pretrained.model.pooler.kernel[...], kept)
    save(pretrained, folder)
    assert load(folder).model.classes.kernel[...].shape == (16, 4)


def test_trained_parameters_are_written(tmp_path: Path) -> None:
    pretrained = loaded("gpt2")
    save(pretrained, tmp_path, jax.tree.map(lambda x: 2 * x, pretrained.params))
    leaves = (jax.tree.leaves(one.params) for one in (load(tmp_path), pretrained))
    for found, old in zip(*leaves, strict=True):
        np.testing.assert_array_equal(found, 2 * np.asarray(old))
    huge = jax.tree.map(lambda x: x * jnp.inf, pretrained.params)
    with pytest.raises(RecipeError, match=r"transformer\..* values that are not finite in float32"):
        save(pretrained, tmp_path, huge)
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match=r"cannot write .*file: File exists"):
        save(pretrained, tmp_path / "file")


def test_dropout_is_that_of_the_config() -> None:
    assert loaded("bert-qa").config.dropout == 0.1
    assert loaded("gpt2").config.dropout == 0.0
    assert load(FIXTURES / "gpt2", dropout=0.3).model.dropout.rate == 0.3


def test_losses_are_means_of_cross_entropies() -> None:
    """Over labels that are not negative; of an answer, over its first and last token."""
    for name in ("bert-mlm", "bert-qa", "bert-classes"):
        inputs, given = reference(FIXTURES / name)
        draw, (size, time) = np.random.default_rng(0), inputs[0].shape
        if name == "bert-mlm":
            labels = (np.where(draw.random((size, time)) < 0.5, -100, inputs[0]),)
        else:
            labels = draw.integers(0, 3, (2 if name == "bert-qa" else 1, size))
        scores = np.moveaxis(given, 1, 2) if name == "bert-qa" else given
        wanted = np.stack(labels, -1) if name == "bert-qa" else np.asarray(labels[0])
        scores = scores.astype(np.float64).reshape(-1, scores.shape[-1])[wanted.ravel() >= 0]
        chosen = scores[np.arange(len(scores)), wanted[wanted >= 0]]
        expected = np.mean(np.log(np.exp(scores).sum(-1)) - chosen)
        model: Any = functools.partial(lambda x, *_, **__: jnp.asarray(x), given)
        assert float(Bert.loss(model, *inputs, *labels)) == pytest.approx(expected, rel=1e-5)


def test_files_beside_the_weights(tmp_path: Path) -> None:
    folder = copied("llama3", tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")  # not read
    (folder / INDEX).write_text("{}", "utf-8")  # left over
    assert load(folder).source.ends == (0,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}', "utf-8")
    pretrained = load(folder)
    assert pretrained.source.ends == (7, 9)
    save(pretrained, tmp_path / "new")
    assert {"generation_config.json", INDEX} - same_files(folder, tmp_path / "new") == {INDEX}
    (folder / "generation_config.json").unlink()
    change_config(folder, eos_token_id=None)
    assert load(folder).source.ends == ()


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: change_tensors(
        folder, lambda old: {key: array for key, array in old.items() if key != name}
    )


def with_tensor(name: str, array: np.ndarray) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda old: old | {name: array})


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_config(folder, **changes)


def text(name: str, content: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(content, "utf-8")


def gone(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def index(**changes: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text("utf-8"))
        assert content["weight_map"].keys() & changes.keys()
        content["weight_map"] |= changes
        (folder / INDEX).write_text(json.dumps(content), "utf-8")

    return change


def in_float8(folder: Path) -> None:
    """A file whose header names a type that is not one of NumPy's or ours."""
    raw = b'{"x": {"dtype": "F8_E4M3FNUZ", "shape": [1], "data_offsets": [0, 1]}}'
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0")


LINEAR = "transformer.h.0.mlp.c_fc.weight"
NORM = "bert.encoder.layer.1.output.LayerNorm.bias"
DENSE = "bert.encoder.layer.0.attention.self.key.weight"
CLASSES, FIRST = "GPT2ForSequenceClassification", "model-00001-of-00002.safetensors"
# folder, what is wrong with it, the message
MISTAKES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("gpt2", gone("config.json"), r"with config\.json; got one without config\.json"),
    ("gpt2", text("config.json", "{"), r"config\.json: expected JSON; got Expecting"),
    ("gpt2", text("config.json", "[1]"), r"config\.json: expected a JSON object; got list"),
    ("gpt2", config(model_type="t5"), r"expected model_type gpt2, llama, .*bert.*; got 't5'"),
    ("gpt2", config(model_type=None), r"expected model_type gpt2, llama, .*bert.*; got None"),
    ("gpt2", config(architectures=[CLASSES]), rf"of GPT2LMHeadModel, GPT2Model; got '{CLASSES}'"),
    ("bert-mlm", config(architectures=["BertModel"]), "with a task; got 'BertModel'; choose the"),
    ("bert-mlm", config(architectures=None), "with a task; got None; choose the task"),
    # files
    (
        "gpt2",
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        r"expected model\.safetensors; got the pickle file pytorch_model\.bin, which can run any",
    ),
    ("gpt2", gone(WEIGHTS), r"expected model\.safetensors; got no such file"),
    (
        "gpt2",
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-4]),
        r"model\.safetensors: expected a safetensors file .*; copy or convert the file",
    ),
    ("gpt2", in_float8, "of types such as F32, F16 and BF16; got .*float8_e4m3fnuz"),
    ("bert-qa", text(INDEX, "{}"), r"index\.json: expected weight_map.*; got None"),
    ("bert-qa", gone(FIRST), "beside it; got 'model-00001-of"),
    ("bert-qa", index(**{NORM: "../weights.safetensors"}), r"beside it; got '\.\./weights"),
    # tensors
    ("qwen3", without("model.layers.1.self_attn.q_norm.weight"), r"q_norm\.weight missing"),
    ("llama3", config(attention_bias=False), r"q_proj\.bias, .* more extra"),
    ("mistral", config(tie_word_embeddings=True), r"lm_head\.weight and model\.embed_tokens\S+ "),
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
]


@pytest.mark.parametrize(("name", "change", "message"), MISTAKES)
def test_what_is_wrong_is_named(name: str, change: Any, message: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    change(folder)
    with pytest.raises(RecipeError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"expected the folder of a .*; got nothing"):
        load(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match=r"expected the folder of a .*; got a file"):
        load(tmp_path / "file")
    with pytest.raises(RecipeError, match="expected a task of gpt2, lm; got 'masked_lm'"):
        load(FIXTURES / "gpt2", "masked_lm")
    with pytest.raises(RecipeError, match=r"expected a task of bert, masked_lm or .*; got 'lm'"):
        load(FIXTURES / "bert-qa", "lm")


@pytest.mark.peers
@pytest.mark.parametrize("architecture", list(fixtures.CLASSES))
def test_logits_of_a_live_model(architecture: str, tmp_path: Path) -> None:
    """Another random shape."""
    draw = np.random.default_rng()
    sizes = [int(n) for n in draw.integers(1, 5, 3)]
    decoders = dict(fixtures.DECODERS.values())
    if architecture.startswith("GPT2"):
        shape = {"n_layer": sizes[0], "n_head": sizes[1], "n_embd": 8 * sizes[1] * sizes[2]}
    elif architecture.startswith("ModernBert"):
        shape = fixtures.MODERN | {"num_hidden_layers": sizes[0] + 1}
        shape |= {"num_attention_heads": sizes[1], "hidden_size": 8 * sizes[1]}
    elif architecture in decoders:
        heads = {"num_attention_heads": 2 * sizes[1], "num_key_value_heads": sizes[1]}
        shape = fixtures.FAMILY | decoders[architecture] | heads
        shape |= {"hidden_size": 4 * sizes[1] * sizes[2], "head_dim": 2 * sizes[0]}
    else:
        shape = {"num_hidden_layers": sizes[0], "num_attention_heads": sizes[1]}
        shape |= {"hidden_size": 8 * sizes[1] * sizes[2], "intermediate_size": 24}
    seed = int(draw.integers(1000))
    model = fixtures.make_model(architecture, seed=seed, vocab_size=99, **shape)
    fixtures.write(tmp_path, model, seed=seed)
    inputs, expected = reference(tmp_path)
    found = logits(load(tmp_path).model, *inputs)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE, err_msg=f"{shape} {seed}")
