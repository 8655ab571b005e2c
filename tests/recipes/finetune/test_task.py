"""Fine-tuning a tiny BERT on both tasks, starting from a run and from a Hugging Face folder."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx

from recipes.cli import main
from recipes.config import TOKENIZER_FILE
from recipes.errors import RecipeError
from recipes.finetune import task as task_module
from recipes.finetune.config import FinetuneConfig, pretraining_of
from recipes.finetune.task import abstract_batch, build, load_data, scores
from recipes.hf import Bert, load
from recipes.registry import load_config
from recipes.run.folder import SCORES
from recipes.run.state import init_state, load_trained
from unitscale import to_array

from ..pretrained import copied, one_layer
from ..support import logits, tuned, write_run, write_tasks

Captured = pytest.CaptureFixture[str]
SGD = "optimizer={name: sgd, b1: 0.0, learning_rate: 0.05}"  # a smaller program than adam's
STANDARD = "optimizer={umup: false, name: sgd, b1: 0.0, learning_rate: 0.05}"


# overrides, and what the message has to name
WRONG = {
    "squad.negatives=-1.0": r"squad\.negatives",
    "squad.stride=5": r"squad\.stride",
    "classification.text=-1": r"classification\.text",
    "classification.pair=label": r"must be different columns; got text 'sentence', pair",
    "classification.text=label": r"must be different columns",
    "task=classification data.mark_matches=true": r"mark_matches needs .*pair.*; got null",
    "squad.mark_matches=true": r"did you mean data\.mark_matches",
    "squad.max_question_length=9": r"no longer a key .* set data\.sequence_length",
    "precision=scalify_float16": r"precision\.scalify .*: expected null for the",
}


def test_wrong_values(folder: Path) -> None:
    for word, message in WRONG.items():
        with pytest.raises(RecipeError, match=message):
            tuned(folder, "squad", *word.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained run, and the files of two tasks."""
    folder = tmp_path_factory.mktemp("finetune")
    write_tasks(folder, write_run(folder))
    return folder


def test_the_config_of_an_earlier_version_is_read(folder: Path, tmp_path: Path) -> None:
    """A removed key is accepted only with the value that is a constant now."""
    config = load_config(folder / "squad.yaml", ["precision=fp8", "data.mark_matches=true"])
    tree = config.model_dump(mode="json")
    del tree["precision"]
    tree |= {"policy": "fp8", "scalify": None, "monitor": None}
    tree["data"]["format"] = tree["classification"]["labels"] = None
    tree["squad"] |= {"version": None, "stride": None, "n_best": 20, "max_answer_length": 30}
    tree["squad"] |= {"no_answer_threshold": 0.0, "max_question_length": 64, "mark_matches": True}
    del tree["data"]["mark_matches"]
    kept = tmp_path / "config.yaml"
    kept.write_text(yaml.safe_dump(tree), "utf-8")
    assert load_config(kept, kept=True) == config
    tree["squad"]["n_best"] = 5
    kept.write_text(yaml.safe_dump(tree), "utf-8")
    with pytest.raises(RecipeError, match=r"squad\.n_best is no longer a key .*; it is always 20"):
        load_config(kept, kept=True)


def unmoved(config: FinetuneConfig) -> list[Any]:
    """Return the parameters that training did not change."""
    before = nnx.to_flat_state(nnx.state(build(config), nnx.Param))
    after = dict(nnx.to_flat_state(load_trained(config, pytest.fail)[1].params))
    pairs = [(path, one.get_value(), after[path].get_value()) for path, one in before]
    return [path for path, old, new in pairs if (to_array(old) == to_array(new)).all()]


@pytest.mark.slow
def test_sentences_are_learned_and_scored(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two words determine the label, so that even a linear model of embeddings could learn it."""
    words = [str(folder / "classification.yaml"), "train.steps=60", SGD]
    assert main(["train", *words]) == 0
    said = re.split(r", |\n", capsys.readouterr().out)
    assert {"accuracy 1", "f1 1", "matthews 1"} <= set(said), said
    run = folder / "runs" / "classification"
    predictions = json.loads((run / "predictions.json").read_text("utf-8"))
    assert len(predictions) == 20
    scores = json.loads((run / SCORES).read_text("utf-8"))
    assert (scores["accuracy"], scores["matthews"]) == (1.0, 1.0)
    assert (run / TOKENIZER_FILE).exists()
    (run / "predictions.json").unlink()
    assert main(["evaluate", *words]) == 0
    again = capsys.readouterr().out
    assert again.startswith("step 60  validation loss 0.")
    assert " nats per row\n" in again
    assert "accuracy 1" in again
    assert json.loads((run / "predictions.json").read_text("utf-8")) == predictions
    assert unmoved(tuned(folder, "classification", *words[1:])) == []
    words = [str(folder / "squad.yaml"), "precision.policy=fp8", SGD]
    assert main(["train", *words]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^exact match [\d.]+, f1 [\d.]+$", said, re.MULTILINE), said
    assert "nats per end of an answer" in said
    assert unmoved(tuned(folder, "squad", *words[1:])) == []


@pytest.mark.slow
def test_weights_of_the_encoder_are_those_of_the_run(folder: Path) -> None:
    """They are not committed to a device; otherwise the second step would compile again."""
    config = tuned(folder, "classification")
    _, state = load_trained(pretraining_of(config.init), print)
    expected = dict(nnx.to_flat_state(state.params))
    own = init_state(config)[2]
    assert not [leaf for leaf in jax.tree.leaves(own) if leaf.committed]
    encoder = nnx.to_flat_state(own.params["encoder"])
    assert len(list(encoder)) > 10
    for path, variable in encoder:
        found = to_array(expected["encoder", *path].get_value())
        np.testing.assert_array_equal(to_array(variable.get_value()), found)


def test_learning_rates_by_role_are_those_of_the_run(folder: Path, tmp_path: Path) -> None:
    written = yaml.safe_load((folder / "runs" / "tiny-bert" / "config.yaml").read_text("utf-8"))
    written["optimizer"]["multipliers"]["embedding"] = 30.0
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written), encoding="utf-8")
    for words, expected in (
        ((), 30.0),
        (("optimizer.umup=false",), 1.0),
        (("optimizer.multipliers={norm: 2.0}",), 1.0),
    ):
        config = tuned(folder, "classification", f"init={tmp_path}", *words)
        assert config.optimizer.multipliers["embedding"] == expected


def test_abstract_batches_are_like_those_of_the_data(folder: Path) -> None:
    for task in ("squad", "classification"):
        config = tuned(folder, task)
        expected = [(part.shape, part.dtype) for part in next(load_data(config).training(0))]
        assert [(part.shape, part.dtype) for part in abstract_batch(config)] == expected


def test_what_does_not_fit_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"init: expected .* recipe bert, or a .* got nowhere"):
        build(tuned(folder, "squad", "init=nowhere"))
    bert = "recipe: bert\nname: b\nmodel: {library: plain, norm_placement: pre}\n"
    runs = {
        "recipe: gpt\nname: gpt\n": "expected recipe bert; got gpt; name another",
        bert + "optimizer: {umup: false}\n": "init: expected a unitscale model; got library plain",
    }
    for content, message in runs.items():
        (tmp_path / "config.yaml").write_text(content, "utf-8")
        with pytest.raises(RecipeError, match=message):
            build(tuned(folder, "squad", f"init={tmp_path}"))
    data = {
        "data.sequence_length=64": "data.sequence_length: .* learned 32 positions; got 64",
        "data.batch_size=40": "data.batch_size: expected at most the 20 records",
    }
    for word, message in data.items():
        with pytest.raises(RecipeError, match=message):
            load_data(tuned(folder, "classification", word))
    run = folder / "runs" / "tiny-bert"
    config = pretraining_of(str(run))
    shape = config.model.model_copy(update={"vocab": 50})
    changed = config.model_copy(update={"model": shape}).model_dump()
    changed["data"]["tokenizer"] = {"kind": "file", "path": str(run / TOKENIZER_FILE)}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(changed), encoding="utf-8")
    (tmp_path / TOKENIZER_FILE).write_bytes((run / TOKENIZER_FILE).read_bytes())
    with pytest.raises(RecipeError, match=r"at most the 50 ids .* of 120"):
        load_data(tuned(folder, "squad", f"init={tmp_path}"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks for a BERT that has no head for either."""
    folder = tmp_path_factory.mktemp("plain")
    write_tasks(folder, one_layer(copied("bert-mlm", folder)))
    return folder


@pytest.mark.slow
def test_logits_of_each_policy_are_those_of_the_model(plain: Path) -> None:
    """Up to rounding: an epsilon of the matmuls' format, over about ten matmuls in a row."""
    found = {}
    for policy in ("float32", "float16", "fp8"):
        config = tuned(plain, "classification", STANDARD, f"precision.policy={policy}")
        model, data = build(config), load_data(config)
        found[policy] = logits(model, data, config.precision)
    batch = next(data.scored.batches(len(data.scored)))
    own = load(config.init, "classification", new_head=True, classes=2).model
    expected = own(*(batch[name] for name in ("ids", "segments", "mask")))
    np.testing.assert_allclose(found["float32"], expected, rtol=1e-5, atol=1e-6)
    size = float(np.sqrt(np.mean(np.square(expected))))
    for policy, dtype in (("float16", jnp.float16), ("fp8", jnp.float8_e4m3fn)):
        error = float(np.sqrt(np.mean(np.square(found[policy] - expected))))
        assert 0 < error < 10 * float(jnp.finfo(dtype).eps) * size, policy


@pytest.mark.slow
def test_questions_in_fp8_and_back(plain: Path, capsys: Captured) -> None:
    words = [str(plain / "squad.yaml"), STANDARD, "precision.policy=fp8", "train.steps=2"]
    assert main(["finetune", *words]) == 0
    said = capsys.readouterr().out
    written = plain / "runs" / "squad" / "pretrained"
    assert f"the tuned model (Hugging Face format) is in {written}" in said
    kept = load(written).model.ends.kernel[...]
    first = build(tuned(plain, "squad", *words[1:]))
    assert isinstance(first, Bert)
    assert (kept != first.ends.kernel[...]).any()
    assert main(["evaluate", *words]) == 0
    (scores,) = re.findall("^exact match.*$", said, re.MULTILINE)
    assert scores in capsys.readouterr().out.splitlines()


# overrides of a plain model's config, and what the message has to name
WRONG_PLAIN = [
    (["optimizer.umup=true"], r"optimizer\.umup: expected false for the Hugging Face folder"),
    (["precision.policy=fp8_delayed"], r"precision: expected policy float32, bfloat16, .*fp8"),
    (["precision.policy=fp8", "precision.monitor=1e-4"], r"no weights, .*got policy fp8, monitor"),
    (["precision.weights=float16"], r"got policy float32, weights"),
    (["precision.policy=bfloat16", "precision.gradients=bfloat16"], r"policy bfloat16, gradients"),
]


def test_a_plain_model_or_folder_that_does_not_fit(plain: Path, tmp_path: Path) -> None:
    for words, message in WRONG_PLAIN:
        with pytest.raises(RecipeError, match=message):
            tuned(plain, "squad", STANDARD, *words)
    with pytest.raises(RecipeError, match="learned 32 positions; got 64"):
        load_data(tuned(plain, "squad", STANDARD, "data.sequence_length=64"))
    gpt = copied("gpt2", tmp_path)
    with pytest.raises(RecipeError, match="bert, roberta, modernbert; got 'gpt2'"):
        load_data(tuned(plain, "squad", STANDARD, f"init={gpt}"))


def test_scores_that_are_not_finite(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tuned(folder, "classification")
    wrong: Any = np.full((len(load_data(config).scored), 2), np.nan, np.float32)
    monkeypatch.setattr(task_module, "predict", lambda *_: wrong)
    model: Any = None
    with pytest.raises(RecipeError, match=r"are not finite; lower optimizer\.lear") as caught:
        scores(config, load_data(config), model, tmp_path)
    assert caught.value.exit_code == 1
