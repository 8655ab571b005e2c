"""Fine-tuning a tiny pretrained BERT on both tasks, from files to scores."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from flax import nnx
from rich.console import Console

from recipes import train as train_module
from recipes.bert.config import BertConfig
from recipes.cli import main
from recipes.configfile import load_any_config
from recipes.data import TOKENIZER_FILE
from recipes.errors import RecipeError
from recipes.finetune.config import FinetuneConfig
from recipes.finetune.pretrained import pretraining_of, tokenizer_of
from recipes.finetune.task import abstract_batch, build, load_data, predict
from recipes.state import load_trained
from recipes.train import train
from unitscale import to_array

from .masked import bert_config, write_bert

PRETRAINED = ("train.steps=2", "train.checkpoint_every=2", "data.sequence_length=32")


def squad(animals: list[str]) -> dict[str, Any]:
    """One paragraph and question for each animal."""
    paragraphs = []
    for number, animal in enumerate(animals):
        context = f"the quick brown {animal} jumps over the lazy dogs"
        answer = {"text": animal, "answer_start": context.index(animal)}
        question = {"id": f"q{number}", "question": "what jumps", "answers": [answer]}
        paragraphs.append({"context": context, "qas": [question]})
    return {"version": "1.1", "data": [{"title": "animals", "paragraphs": paragraphs}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained run, and the files of two tasks."""
    folder = tmp_path_factory.mktemp("finetune")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "plot_run", lambda run: None)
        config = bert_config(write_bert(folder), *PRETRAINED)
        train(config, console=Console(file=io.StringIO()))
    animals = ["fox", "jumper", "line", "dog"] * 3
    (folder / "squad.json").write_text(json.dumps(squad(animals)), encoding="utf-8")
    rows = [("quick fox", 1), ("lazy dogs", 0), ("brown fox", 1), ("lazy line", 0)] * 5
    lines = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in rows)]
    (folder / "rows.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for task, file in (("squad", "squad.json"), ("classification", "rows.tsv")):
        tree = {
            "recipe": "finetune",
            "name": task,
            "init": str(folder / "runs" / "tiny-bert"),
            "task": task,
            "data": {
                "train": str(folder / file),
                "validation": str(folder / file),
                "sequence_length": 24,
                "batch_size": 8,
            },
            "squad": {"max_question_length": 8},
            "dropout": 0.0,
            "optimizer": {"learning_rate": 0.1},
            "train": {
                "steps": 4,
                "eval_every": 2,
                "eval_batches": 1,
                "checkpoint_every": 2,
                "log_every": 1,
                "runs_dir": str(folder / "runs"),
            },
        }
        (folder / f"{task}.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder


def tuned(folder: Path, task: str, *overrides: str) -> FinetuneConfig:
    config = load_any_config(folder / f"{task}.yaml", overrides)
    assert isinstance(config, FinetuneConfig)
    return config


@pytest.fixture(autouse=True)
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "plot_run", lambda run: None)


@pytest.mark.parametrize(
    ("task", "scores"), [("squad", ["exact match", "F1"]), ("classification", ["accuracy", "F1"])]
)
def test_command_trains_scores_and_resumes(
    folder: Path, task: str, scores: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"init={folder / 'runs' / 'tiny-bert'}", "policy=fp8"]
    assert main(["finetune", str(folder / f"{task}.yaml"), *words]) == 0
    said = capsys.readouterr().out
    assert all(score in said for score in scores)
    run = folder / "runs" / task
    predictions = json.loads((run / "predictions.json").read_text("utf-8"))
    assert len(predictions) == (12 if task == "squad" else 20)
    assert (run / TOKENIZER_FILE).exists()
    (run / "predictions.json").unlink()
    assert main(["finetune", str(folder / f"{task}.yaml"), *words]) == 0
    assert "all 4 steps are done" in capsys.readouterr().out
    assert json.loads((run / "predictions.json").read_text("utf-8")) == predictions


def test_a_task_is_learned(folder: Path) -> None:
    """Two words decide the label: a linear model over the first states could tell them apart."""
    words = [
        "train={steps: 100, eval_every: 100, log_every: 100, checkpoint_every: 100}",
        "name=learned",
    ]
    config = tuned(folder, "classification", *words)
    output = io.StringIO()
    train(config, console=Console(file=output, width=200))
    said = re.split(r", |\n", output.getvalue())
    assert {"accuracy 1", "F1 1", "Matthews correlation 1"} <= set(said), said


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


def test_padding_changes_no_score(folder: Path) -> None:
    short, long = (
        tuned(folder, "classification", f"data.sequence_length={n}", f"name=n{n}") for n in (8, 16)
    )
    model = build(short)
    scores = [predict(model, load_data(config)) for config in (short, long)]
    np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("task", ["squad", "classification"])
def test_abstract_batches_are_like_those_of_the_data(folder: Path, task: str) -> None:
    config = tuned(folder, task)
    expected = [(part.shape, part.dtype) for part in next(load_data(config).training(0))]
    assert [(part.shape, part.dtype) for part in abstract_batch(config)] == expected


def test_gradients_reach_every_parameter(folder: Path) -> None:
    for task in ("squad", "classification"):
        config = tuned(folder, task)
        model, batch = build(config), next(load_data(config).training(0))
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, graphdef=graphdef, rest=rest, batch=batch):
            return nnx.merge(graphdef, params, rest).loss(*batch, deterministic=True)

        for path, gradient in nnx.to_flat_state(jax.jit(jax.grad(loss))(params)):
            size = float(np.abs(to_array(gradient.get_value())).max())
            # The bias of keys moves all logits of a query alike.
            assert size > 0 or path[-2:] == ("key", "bias"), path


def test_what_does_not_fit_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"init: no run at .*nowhere"):
        build(tuned(folder, "squad", "init=nowhere"))
    with pytest.raises(RecipeError, match="learned 32 positions; got 64"):
        load_data(tuned(folder, "squad", "data.sequence_length=64"))
    with pytest.raises(RecipeError, match=r"data\.batch_size: expected at most the 20 records"):
        load_data(tuned(folder, "classification", "data.batch_size=40"))
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
        tokenizer_of(str(other))


def test_command_takes_configs_of_its_recipe_only(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["finetune", str(folder / "tiny-bert.yaml")]) == 2
    assert "expected a config of recipe finetune; got recipe bert" in capsys.readouterr().err
