"""Models from Hugging Face folders: same logits as `transformers`, same files written, errors.

`make_pretrained_fixtures.py` drew the weights in `pretrained_fixtures`.
"""

import functools
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from recipes.errors import RecipeError
from recipes.hf import Bert, load, save
from unitscale import as_scaled

from ..pretrained import (
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
INDEX = "model.safetensors.index.json"


@functools.cache
def loaded(name: str) -> Any:
    return load(FIXTURES / name)


@nnx.jit
def logits(model: Any, *inputs: np.ndarray) -> jax.Array:
    return model(*inputs)


def same_files(one: Path, other: Path) -> set[str]:
    """List the files of the second folder, which must be equal to those of the first."""
    names = {file.name for file in other.iterdir()}
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    return names


# The other folders have the families and parts of these.
FAST = ("gpt2", "llama3", "modernbert-mlm")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x not in FAST)) for x in FOLDERS]
)
def test_logits_and_files_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    inputs, expected = reference(FIXTURES / name)
    model = loaded(name).model
    found = logits(model, *inputs)
    assert found.dtype == np.float32
    assert np.abs(expected).max() > 1e3 * TOLERANCE, "the comparison can fail"
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    save(loaded(name), tmp_path, as_scaled(loaded(name).params))
    written = same_files(FIXTURES / name, tmp_path)
    assert written >= {"config.json", "tokenizer.json"}
    assert len([file for file in written if file.endswith("s")]) == SHARDS.get(name, 1)
    if not name.endswith("classes"):
        return
    ids, segments, mask = inputs
    other = np.where(mask == 1, ids, (ids + 7) % 100)  # padding changes nothing
    np.testing.assert_allclose(logits(model, other, segments, mask), expected, atol=TOLERANCE)
    whole = logits(model, ids, segments * 0, mask * 0 + 1)
    assert np.abs(whole - expected).max() > TOLERANCE
    np.testing.assert_allclose(logits(model, ids), whole, atol=TOLERANCE)
    if name == "bert-classes":
        assert np.abs(logits(model, ids, segments * 0, mask) - expected).max() > TOLERANCE


@pytest.mark.parametrize(
    "folder",
    ["gemma3", *(pytest.param(x, marks=pytest.mark.slow) for x in ("llama3", "mistral", "gemma2"))],
)
def test_cached_logits_are_the_uncached_ones(folder: str) -> None:
    """Process a prompt, then one token at a time, beyond the attention window."""
    (ids,), expected = reference(FIXTURES / folder)
    graphdef, state = nnx.split(loaded(folder).model)
    step = jax.jit(lambda state, ids, cache: nnx.merge(graphdef, state)(ids, cache=cache))
    cache = nnx.merge(graphdef, state).init_cache(len(ids), ids.shape[1] + 1)
    pieces = []
    for piece in np.split(ids, [4, 5, 6, 7, 8, 9, 10], axis=1):
        out, cache = step(state, jnp.asarray(piece), cache)
        pieces.append(out)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), expected, atol=TOLERANCE)


def test_types_of_the_file_are_kept(tmp_path: Path) -> None:
    folder = copied("gpt2", tmp_path)
    change_tensors(folder, lambda old: {k: jnp.asarray(v, "bfloat16") for k, v in old.items()})
    half, wide = load(folder), load(folder, param_dtype=jnp.float32)
    for pretrained, kept in ((half, "bfloat16"), (wide, "float32")):
        assert {leaf.dtype for leaf in jax.tree.leaves(pretrained.params)} == {jnp.dtype(kept)}
        save(pretrained, tmp_path / "new")
        assert same_files(folder, tmp_path / "new") >= {WEIGHTS}
    save(half, folder)  # over itself
    assert same_files(folder, tmp_path / "new")


@pytest.mark.slow
def test_tensors_are_read_one_at_a_time(tmp_path: Path) -> None:
    """Loading 59 MB for `adapt` needs less memory than four of the largest tensors."""
    folder, wide = copied("llama2", tmp_path), {16: 512, 24: 4096, 8: 256, 300: 300}
    change_config(folder, hidden_size=512, intermediate_size=4096, head_dim=128)
    for file in folder.glob("*.safetensors"):
        old = safetensors.numpy.load_file(file)
        new = {k: np.zeros([wide[n] for n in v.shape], v.dtype) for k, v in old.items()}
        safetensors.numpy.save_file(new, file, {"format": "pt"})
    tracemalloc.start()
    for _, variable in nnx.to_flat_state(load(folder, lazy=True).params):
        assert not np.asarray(variable.get_value()).any()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 512 * 4096 * 4


def bare_llama(old: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rename tensors as in a model without a head, and add the buffers of early Llamas."""
    new = {name.removeprefix("model."): array for name, array in old.items()}
    return new | {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}


def bare_gpt2(old: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rename tensors as in early GPT-2 files: no "transformer.", and a mask in every layer."""
    new = {name.removeprefix("transformer."): array for name, array in old.items()}
    new["h.0.attn.bias"] = np.tril(np.ones((1, 1, 32, 32), np.float32))
    return new | {"h.1.attn.masked_bias": np.float32(-1e4)}


def old_bert(old: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rename tensors as in early BERT files, with an unused head and tied tensors stored twice."""
    norms = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    new = {}
    for name, array in old.items():
        end = ".".join(name.split(".")[-2:])
        new[name.removesuffix(end) + norms.get(end, end)] = array
    new["bert.embeddings.position_ids"] = np.arange(32)[None].astype(np.int32)
    new["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"]
    new["cls.predictions.decoder.bias"] = old["cls.predictions.bias"]
    return new | {"cls.seq_relationship.weight": np.ones((2, 16), np.float32)}


OLD = [("gpt2", bare_gpt2), ("llama3", bare_llama), ("bert-mlm", old_bert)]


@pytest.mark.slow
def test_files_of_old_versions(tmp_path: Path) -> None:
    """Old files load the same parameters, and are written back unchanged."""
    for name, change in OLD:
        folder = copied(name, tmp_path)
        change_tensors(folder, change)
        pretrained = load(folder)
        chex.assert_trees_all_equal(pretrained.params, loaded(name).params)
        save(pretrained, tmp_path / name / "new")
        same_files(folder, tmp_path / name / "new")


@pytest.mark.parametrize("name", ["gpt2", pytest.param("bert-mlm", marks=pytest.mark.slow)])
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


# folder, task, and the modules that a new head draws
HEADS = [
    ("bert-qa", "classification", ("bert.pooler.dense", "classifier")),
    ("roberta-mlm", "classification", ("classifier.dense", "classifier.out_proj")),
    ("modernbert-mlm", "classification", ("classifier",)),
    ("roberta-mlm", "question_answering", ("qa_outputs",)),
    ("modernbert-mlm", "question_answering", ("classifier",)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task", "modules"), HEADS)
def test_a_new_head(name: str, task: Any, modules: tuple[str, ...], tmp_path: Path) -> None:
    drawn = {f"{module}.{part}" for module in modules for part in ("weight", "bias")}
    with pytest.raises(RecipeError, match=rf"task {task}; {min(drawn)[:9]}.* a new head"):
        load(FIXTURES / name, task)
    classes = 5 if task == "classification" else None
    pretrained = load(FIXTURES / name, task, new_head=True, classes=classes)
    assert set(pretrained.drawn) == drawn
    save(pretrained, tmp_path)
    assert not (tmp_path / INDEX).exists()  # which bert-qa has
    tensors = safetensors.numpy.load_file(tmp_path / WEIGHTS)  # which writes the same bytes
    assert safetensors.numpy.save(tensors, {"format": "pt"}) == (tmp_path / WEIGHTS).read_bytes()
    again: Any = load(tmp_path)
    assert (again.task, again.drawn) == (task, ())
    chex.assert_trees_all_equal(again.params, pretrained.params)
    if classes is None:
        return
    assert again.config.labels == tuple(f"LABEL_{index}" for index in range(5))
    for source in (pretrained, again):  # a head that is new, and one that was there
        save(source, tmp_path / "named", labels="edcba")
        config = json.loads((tmp_path / "named" / "config.json").read_text("utf-8"))
        assert list(config["id2label"].values()) == list("edcba")
        assert config["label2id"] == {"e": 0, "d": 1, "c": 2, "b": 3, "a": 4}
        assert config["architectures"][0].endswith("ForSequenceClassification")
    bare = copied(name, tmp_path / "bare")
    change_config(bare, id2label=dict(enumerate("abcde")))
    save(load(bare, task, new_head=True, classes=5), tmp_path / "same", labels="abcde")
    assert load(tmp_path / "same").config.labels == tuple("abcde")
    with pytest.raises(RecipeError, match=r"expected the 5 classes .*got 4"):
        load(tmp_path, classes=4, new_head=True)


def test_trained_parameters_are_written(tmp_path: Path) -> None:
    pretrained = loaded("gpt2")
    doubled = jax.tree.map(lambda x: 2 * x, pretrained.params)
    save(pretrained, tmp_path, doubled)
    chex.assert_trees_all_equal(load(tmp_path).params, doubled)
    huge = jax.tree.map(lambda x: x * jnp.inf, pretrained.params)
    with pytest.raises(RecipeError, match=r"transformer\..* values that are not finite in float32"):
        save(pretrained, tmp_path, huge)
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match=r"cannot write .*file: File exists"):
        save(pretrained, tmp_path / "file")


def test_losses_are_means_of_cross_entropies() -> None:
    """Negative labels do not count; answers average over first and last token."""
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
        model: Any = lambda *_, given=given, **__: jnp.asarray(given)  # noqa: E731
        loss = jax.jit(functools.partial(Bert.loss, model))(*inputs, *labels)
        assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_files_beside_the_weights(tmp_path: Path) -> None:
    folder = copied("llama3", tmp_path)
    (folder / INDEX).write_text("{}", "utf-8")  # left over
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}', "utf-8")
    pretrained = load(folder)
    assert (pretrained.source.ends, loaded("llama3").source.ends) == ((7, 9), (0,))
    save(pretrained, tmp_path / "new")
    assert {"generation_config.json", INDEX} - same_files(folder, tmp_path / "new") == {INDEX}


Change = Callable[[Path], Any]


def without(name: str) -> Change:
    return lambda f: change_tensors(f, lambda was: {k: v for k, v in was.items() if k != name})


def with_array(name: str, array: Any) -> Change:
    return lambda folder: change_tensors(folder, lambda old: old | {name: np.asarray(array)})


def config(**changes: Any) -> Change:
    return lambda folder: change_config(folder, **changes)


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content, "utf-8")


def gone(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def in_float8(folder: Path) -> None:
    """Write a file whose header has an unsupported dtype."""
    raw = b'{"x": {"dtype": "F8_E4M3FNUZ", "shape": [1], "data_offsets": [0, 1]}}'
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0")


LINEAR = "transformer.h.0.mlp.c_fc.weight"
# folder, what is wrong with it, what the message has to name
MISTAKES: list[tuple[str, Change, str]] = [
    ("gpt2", gone("config.json"), r"with config\.json; got one without"),
    ("gpt2", text("config.json", "{"), r"config\.json: expected JSON"),
    ("gpt2", config(model_type="t5"), r"model_type gpt2, llama, .*bert.*; got 't5'"),
    ("gpt2", config(architectures=["GPT2ForTokens"]), r"GPT2LMHeadModel, .*and 'GPT2ForTokens'"),
    ("bert-mlm", config(architectures=None), "task .*got None and None"),
    ("gpt2", gone(WEIGHTS), r"expected model\.safetensors; got no such file"),
    ("gpt2", in_float8, "F32, F16 and BF16; got .*F8_E4M3FNUZ"),
    ("bert-qa", text(INDEX, "{}"), r"index\.json: expected weight_map.*; got None"),
    ("bert-qa", text(INDEX, '{"weight_map": {"x": "../w"}}'), r"in this folder; got '\.\./w'"),
    ("qwen3", without("model.layers.1.self_attn.q_norm.weight"), r"q_norm\.weight missing"),
    ("llama3", config(attention_bias=False), r"q_proj\.bias, .* more as well"),
    ("mistral", config(tie_word_embeddings=True), r"lm_head\.weight and model\.embed_tokens\S+ "),
    ("bert-classes", without("classifier.bias"), r"classifier\.bias missing"),
    ("gpt2", config(n_layer=1), r"transformer\.h\.1\.\S+, .* and 8 more as well"),
    ("gpt2", config(n_inner=64), r"c_fc\.bias must be \[64\] of float32.*; got \[40\] of float32"),
    ("gpt2", with_array(LINEAR, np.ones((16, 40), int)), r"got \[16, 40\] of int32"),
]


def test_mistakes_are_named(tmp_path: Path) -> None:
    for number, (name, change, message) in enumerate(MISTAKES):
        change(folder := copied(name, tmp_path / str(number)))
        with pytest.raises(RecipeError, match=message) as caught:
            load(folder)
        assert str(folder) in str(caught.value)


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"expected the folder of a .*; got nothing"):
        load(tmp_path / "absent")
    with pytest.raises(RecipeError, match=r"expected a task of gpt2, .*; got 'masked_lm'"):
        load(FIXTURES / "gpt2", "masked_lm")
