"""Models from Hugging Face folders: the logits of `transformers`, and the same bytes back.

The folders in `pretrained_fixtures` are those of `make_pretrained_fixtures.py`.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.errors import RecipeError
from recipes.hf import Pretrained, join, labels_in, load, save, split
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

# Differences of float32 sums in another order; a figure of the project.
TOLERANCE = 1e-4


def logits(model, *inputs: np.ndarray) -> np.ndarray:
    return np.asarray(nnx.jit(lambda model, *inputs: model(*inputs))(model, *inputs))


def same_files(one: Path, other: Path) -> set[str]:
    """Names of the files of the second folder, all equal to those of the first."""
    names = {file.name for file in other.iterdir()}
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    return names


@pytest.fixture(scope="module")
def loaded() -> dict[str, Pretrained]:
    return {name: load(FIXTURES / name) for name in FOLDERS}


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_those_of_transformers(name: str, loaded: dict[str, Pretrained]) -> None:
    inputs, expected = reference(FIXTURES / name)
    found = logits(loaded[name].model, *inputs)
    assert found.dtype == np.float32
    assert np.abs(expected).max() > 1e3 * TOLERANCE, "the comparison can fail"
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_what_is_padding_changes_nothing(loaded: dict[str, Pretrained]) -> None:
    model = loaded["bert-classes"].model
    (ids, segments, mask), expected = reference(FIXTURES / "bert-classes")
    other = np.where(mask == 1, ids, (ids + 7) % 100)
    assert (other != ids).any()
    np.testing.assert_allclose(logits(model, other, segments, mask), expected, atol=TOLERANCE)
    assert np.abs(logits(model, other, segments, mask * 0 + 1) - expected).max() > TOLERANCE
    assert np.abs(logits(model, ids, segments * 0, mask) - expected).max() > TOLERANCE


@pytest.mark.parametrize("name", FOLDERS)
def test_the_same_files_are_written(
    name: str, loaded: dict[str, Pretrained], tmp_path: Path
) -> None:
    save(loaded[name], tmp_path / "new")
    written = same_files(FIXTURES / name, tmp_path / "new")
    assert written >= {"config.json", "tokenizer.json"}
    files = [file for file in written if file.endswith(".safetensors")]
    assert len(files) == SHARDS.get(name, 1)
    save(loaded[name], tmp_path / "new", split(loaded[name].params))
    assert same_files(FIXTURES / name, tmp_path / "new") == written


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types_of_the_file_are_kept(dtype: str, tmp_path: Path) -> None:
    folder = copied("gpt2", tmp_path)
    change_tensors(folder, lambda old: {k: jnp.asarray(v, dtype) for k, v in old.items()})
    half = load(folder)
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {jnp.dtype(dtype)}
    wide = load(folder, param_dtype=jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(wide.params)} == {jnp.dtype("float32")}
    for pretrained in (half, wide):
        save(pretrained, tmp_path / "new")
        assert same_files(folder, tmp_path / "new") >= {WEIGHTS}
    save(half, folder)  # over itself
    assert same_files(folder, tmp_path / "new")


def bare_with_frequencies(old: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The names of a model without a head, and the buffers of the first Llamas."""
    new = {name.removeprefix("model."): array for name, array in old.items()}
    new["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    return new


def bare_with_buffers(old: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The names of GPT-2's first files: no "transformer." and a mask in every layer."""
    new = {name.removeprefix("transformer."): array for name, array in old.items()}
    new["h.0.attn.bias"] = np.tril(np.ones((1, 1, 32, 32), np.float32))
    new["h.1.attn.masked_bias"] = np.float32(-1e4)
    return new


def old_names(old: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The names of BERT's first files, its unused head, and tensors that are tied twice over."""
    new = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): array
        for name, array in old.items()
    }
    new["bert.embeddings.position_ids"] = np.arange(32)[None].astype(np.int32)
    new["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"]
    new["cls.predictions.decoder.bias"] = old["cls.predictions.bias"]
    new["cls.seq_relationship.weight"] = np.ones((2, 16), np.float32)
    return new


@pytest.mark.parametrize(
    ("name", "change", "unused"),
    [
        ("gpt2", bare_with_buffers, ()),
        ("llama3", bare_with_frequencies, ()),
        ("bert-mlm", old_names, ("cls.seq_relationship.weight",)),
    ],
)
def test_files_of_old_versions(name: str, change, unused: tuple[str, ...], tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    change_tensors(folder, change)
    pretrained = load(folder)
    assert pretrained.unused == unused
    inputs, expected = reference(folder)
    np.testing.assert_allclose(logits(pretrained.model, *inputs), expected, rtol=0, atol=TOLERANCE)
    save(pretrained, tmp_path / "new")
    same_files(folder, tmp_path / "new")


@pytest.mark.parametrize("name", ["gpt2", "bert-mlm"])
def test_a_readout_of_its_own(name: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    change_config(folder, tie_word_embeddings=False)
    gpt = name == "gpt2"
    table = "transformer.wte.weight" if gpt else "bert.embeddings.word_embeddings.weight"
    readout = "lm_head.weight" if gpt else "cls.predictions.decoder.weight"
    change_tensors(folder, lambda old: old | {readout: -old[table]})
    inputs, expected = reference(folder)
    expected = -expected
    if not gpt:
        expected += 2 * np.asarray(load(FIXTURES / name).model.bias[...])
    pretrained = load(folder)
    np.testing.assert_allclose(logits(pretrained.model, *inputs), expected, rtol=0, atol=TOLERANCE)
    save(pretrained, tmp_path / "new")
    same_files(folder, tmp_path / "new")


def test_a_new_head(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"task classification; got none of bert\.pooler\.dense"):
        load(FIXTURES / "bert-mlm", "classification")
    pretrained = load(FIXTURES / "bert-mlm", "classification", new_head=True, classes=5)
    assert set(pretrained.drawn) == {
        f"{name}.{part}"
        for name in ("bert.pooler.dense", "classifier")
        for part in ("weight", "bias")
    }
    assert all(name.startswith("cls.predictions.") for name in pretrained.unused)
    (ids, *rest), _ = reference(FIXTURES / "bert-mlm")
    expected = logits(pretrained.model, ids, *rest)
    assert expected.shape == (len(ids), 5)
    save(pretrained, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert len(config["id2label"]) == len(config["label2id"]) == 5
    for source in (pretrained, load(tmp_path)):  # a head that is new, and one that was there
        save(source, tmp_path / "named", labels="edcba")
        config = json.loads((tmp_path / "named" / "config.json").read_text("utf-8"))
        assert labels_in(str(tmp_path / "named")) == tuple("edcba")
        assert config["label2id"] == {"e": 0, "d": 1, "c": 2, "b": 3, "a": 4}
    again = load(tmp_path)
    assert (again.drawn, again.unused) == ((), ())
    np.testing.assert_array_equal(logits(again.model, ids, *rest), expected)
    with pytest.raises(RecipeError, match=r"classes to be None or that of the folder; got 4"):
        load(tmp_path, classes=4)


def test_a_new_head_of_roberta(tmp_path: Path) -> None:
    pretrained = load(FIXTURES / "roberta-mlm", "classification", new_head=True, classes=5)
    assert pretrained.drawn[0] == "classifier.dense.weight"
    assert all(name.startswith("lm_head.") for name in pretrained.unused)
    save(pretrained, tmp_path)
    again = load(tmp_path)
    assert again.task == "classification"
    inputs, _ = reference(FIXTURES / "roberta-mlm")
    expected = logits(pretrained.model, *inputs)
    np.testing.assert_array_equal(logits(again.model, *inputs), expected)
    assert (again.config.longest, again.config.context) == (28, 32)


def test_a_new_head_of_modernbert(tmp_path: Path) -> None:
    """The layer before it is that of the masked language model."""
    pretrained = load(FIXTURES / "modernbert-mlm", "classification", new_head=True, classes=5)
    assert pretrained.drawn == ("classifier.weight", "classifier.bias")
    assert pretrained.unused == ("decoder.bias",)
    save(pretrained, tmp_path)
    inputs, _ = reference(FIXTURES / "modernbert-mlm")
    expected = logits(pretrained.model, *inputs)
    np.testing.assert_array_equal(logits(load(tmp_path).model, *inputs), expected)


def test_a_new_classifier_on_a_pooler_that_is_there(tmp_path: Path) -> None:
    folder = copied("bert-classes", tmp_path)
    change_tensors(
        folder, lambda old: {k: v for k, v in old.items() if not k.startswith("classifier.")}
    )
    with pytest.raises(RecipeError, match=r"got none of classifier\.weight, classifier\.bias; "):
        load(folder)
    pretrained = load(folder, new_head=True, classes=4)
    assert pretrained.drawn == ("classifier.weight", "classifier.bias")
    kept = load(FIXTURES / "bert-classes").model.pooler.kernel[...]
    np.testing.assert_array_equal(pretrained.model.pooler.kernel[...], kept)
    assert pretrained.model.classes.kernel[...].shape == (16, 4)
    save(pretrained, folder)
    assert load(folder).drawn == ()


def test_trained_parameters_are_written(loaded: dict[str, Pretrained], tmp_path: Path) -> None:
    pretrained = loaded["gpt2"]
    doubled = jax.tree.map(lambda x: 2 * x, pretrained.params)
    save(pretrained, tmp_path, doubled)
    for ours, theirs in zip(
        jax.tree.leaves(load(tmp_path).params), jax.tree.leaves(pretrained.params), strict=True
    ):
        np.testing.assert_array_equal(ours, 2 * join(theirs))
    huge = jax.tree.map(lambda x: x * jnp.inf, pretrained.params)
    with pytest.raises(RecipeError, match=r"transformer\..* values that are not finite in float32"):
        save(pretrained, tmp_path, huge)


def test_dropout_is_that_of_the_config(loaded: dict[str, Pretrained]) -> None:
    assert loaded["bert-qa"].config.dropout == 0.1
    assert loaded["gpt2"].config.dropout == 0.0
    assert load(FIXTURES / "gpt2", dropout=0.3).model.dropout.rate == 0.3


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
        shape = {
            "num_hidden_layers": sizes[0],
            "num_attention_heads": sizes[1],
            "hidden_size": 8 * sizes[1] * sizes[2],
            "intermediate_size": 24,
        }
    seed = int(draw.integers(1000))
    model = fixtures.make_model(architecture, seed=seed, vocab_size=99, **shape)
    fixtures.write(tmp_path, model, seed=seed)
    inputs, expected = reference(tmp_path)
    found = logits(load(tmp_path).model, *inputs)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE, err_msg=f"{shape} {seed}")
