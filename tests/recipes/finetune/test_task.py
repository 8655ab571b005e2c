"""Fine-tuning a tiny pretrained BERT on both tasks, from files to scores."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from flax import nnx

from recipes.bert.config import BertConfig
from recipes.cli import main
from recipes.config import TOKENIZER_FILE
from recipes.errors import RecipeError
from recipes.finetune.config import FinetuneConfig, pretraining_of
from recipes.finetune.pretrained import tokenizer_of
from recipes.finetune.task import abstract_batch, build, load_data
from recipes.run.evaluate import SCORES
from recipes.run.state import init_state, load_trained
from unitscale import to_array

from ..masked import write_run
from ..tasks import ANIMALS, logits, squad, tuned, write_tasks

SGD = "optimizer={name: sgd, b1: 0.0, learning_rate: 0.05}"  # a smaller program than adam's


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained run, and two tasks."""
    folder = tmp_path_factory.mktemp("finetune")
    write_tasks(folder, write_run(folder))
    return folder


def trained_parameters(config: FinetuneConfig) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Values before training and after, by name."""
    before = nnx.to_flat_state(nnx.state(build(config), nnx.Param))
    after = dict(nnx.to_flat_state(load_trained(config, pytest.fail)[1].params))
    return {
        ".".join(map(str, path)): (
            np.asarray(to_array(one.get_value())),
            np.asarray(to_array(after[path].get_value())),
        )
        for path, one in before
    }


@pytest.mark.slow
def test_sentences_are_learned_and_scored(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two words decide the label: a linear model over the first states could tell them apart."""
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
    moved = trained_parameters(tuned(folder, "classification", *words[1:]))
    assert [name for name, (before, after) in moved.items() if (before == after).all()] == []


@pytest.mark.slow
def test_questions_are_answered_in_fp8(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(folder / "squad.yaml"), "policy=fp8", SGD]
    assert main(["train", *words]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^exact match [\d.]+, f1 [\d.]+$", said, re.MULTILINE), said
    assert "nats per end of an answer" in said
    predictions = json.loads((folder / "runs" / "squad" / "predictions.json").read_text("utf-8"))
    assert len(predictions) == 12
    moved = trained_parameters(tuned(folder, "squad", *words[1:]))
    assert [name for name, (before, after) in moved.items() if (before == after).all()] == []
    assert main(["train", *words]) == 0
    assert "all 4 steps are done" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["squad", "classification"])
def test_weights_of_the_encoder_are_those_of_the_run(folder: Path, task: str) -> None:
    config = tuned(folder, task)
    model = build(config)
    _, state = load_trained(pretraining_of(config.init), print)
    expected = dict(nnx.to_flat_state(state.params))
    own = nnx.to_flat_state(nnx.state(model.encoder, nnx.Param))
    assert len(list(own)) > 10
    for path, variable in own:
        found = to_array(expected["encoder", *path].get_value())
        np.testing.assert_array_equal(to_array(variable.get_value()), found)


def test_weights_that_are_taken_bind_the_step_to_no_device(folder: Path) -> None:
    """Of arrays of both kinds the first step makes bound ones, and the second compiles again."""
    state = init_state(tuned(folder, "classification"))[2]
    assert not [leaf for leaf in jax.tree.leaves(state) if leaf.committed]


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_padding_changes_no_score(folder: Path, pooling: str) -> None:
    words = "classification", f"classification={{pooling: {pooling}}}"
    short, long = (
        tuned(folder, *words, f"data.sequence_length={n}", f"name=n{n}") for n in (8, 16)
    )
    model = build(short)
    scores = [logits(model, load_data(config)) for config in (short, long)]
    np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-5)


def test_learning_rates_by_role_are_those_of_the_run(folder: Path) -> None:
    run = folder / "runs" / "tiny-bert"
    written = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
    written["optimizer"]["multipliers"]["embedding"] = 30.0
    other = folder / "runs" / "fast-embedding"
    other.mkdir()
    (other / "config.yaml").write_text(yaml.safe_dump(written), encoding="utf-8")

    def embedding(*words: str) -> float:
        config = tuned(folder, "classification", f"init={other}", *words)
        return config.optimizer.multipliers.embedding

    assert embedding() == 30.0
    assert embedding("optimizer.umup=false") == 1.0
    assert embedding("optimizer.multipliers={norm: 2.0}") == 1.0


@pytest.mark.parametrize("task", ["squad", "classification"])
def test_abstract_batches_are_like_those_of_the_data(folder: Path, task: str) -> None:
    config = tuned(folder, task)
    expected = [(part.shape, part.dtype) for part in next(load_data(config).training(0))]
    assert [(part.shape, part.dtype) for part in abstract_batch(config)] == expected


def test_what_does_not_fit_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"init: expected the .* recipe bert, or a .* got nowhere"
    ):
        build(tuned(folder, "squad", "init=nowhere"))
    gpt = folder / "gpt"
    gpt.mkdir()
    (gpt / "config.yaml").write_text("recipe: gpt\nname: gpt\n", "utf-8")
    with pytest.raises(RecipeError, match=r"expected a run of recipe bert; got one of gpt; name"):
        build(tuned(folder, "squad", f"init={gpt}"))
    (gpt / "config.yaml").write_text(
        "recipe: bert\nname: b\nmodel: {library: plain, norm_placement: pre}\n"
        "optimizer: {umup: false}\n",
        "utf-8",
    )
    with pytest.raises(RecipeError, match="expected the run of a unitscale model; got that of a"):
        tuned(folder, "squad", f"init={gpt}")
    with pytest.raises(RecipeError, match="learned 32 positions; got 64"):
        load_data(tuned(folder, "squad", "data.sequence_length=64"))
    with pytest.raises(RecipeError, match=r"data\.batch_size: expected at most the 20 records"):
        load_data(tuned(folder, "classification", "data.batch_size=40"))
    tree = squad(ANIMALS)
    tree["data"][0]["paragraphs"][0]["qas"][0] |= {"answers": [], "is_impossible": True}
    (tmp_path / "v2.json").write_text(json.dumps(tree), "utf-8")
    words = (f"data.validation={tmp_path / 'v2.json'}", "squad.version=v1.1")
    with pytest.raises(
        RecipeError, match=r"squad\.version: expected an answer .* got none for 'q0"
    ):
        load_data(tuned(folder, "squad", *words))
    with pytest.raises(RecipeError, match="scalify is for plain models"):
        tuned(folder, "squad", "scalify={}")
    run = folder / "runs" / "tiny-bert"
    config = pretraining_of(str(run))
    assert isinstance(config, BertConfig)
    other = tmp_path / "other"
    other.mkdir()
    shape = config.model.model_copy(update={"vocab": 50})
    changed = config.model_copy(update={"model": shape}).model_dump()
    changed["data"]["tokenizer"] = {"kind": "file", "path": str(run / TOKENIZER_FILE)}
    (other / "config.yaml").write_text(yaml.safe_dump(changed), encoding="utf-8")
    (other / TOKENIZER_FILE).write_bytes((run / TOKENIZER_FILE).read_bytes())
    with pytest.raises(RecipeError, match=r"at most the 50 ids of the model .* got 120"):
        tokenizer_of(tuned(folder, "squad", f"init={other}"))


def test_a_run_is_described_without_its_weights(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["describe", str(folder / "squad.yaml")]) == 0
    assert "squad: recipe finetune, policy float32" in capsys.readouterr().out
