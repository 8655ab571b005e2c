"""The folder of a run accepts one config only; its metrics survive a crash."""

import sys
from math import log
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.registry import load_config
from recipes.run.folder import (
    existing_run,
    locked,
    open_metrics,
    open_run,
    read_metrics,
    record_config,
)
from recipes.train import shown, train

from ..conftest import MakeConfig


def test_made_once_opened_again_and_moved(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    folder = open_run(config)
    (folder / "metrics.jsonl").touch()
    assert open_run(config) == folder
    assert (folder / "metrics.jsonl").exists()
    assert load_config(folder / "config.yaml") == config
    keys = ("eval_every", "checkpoint_every", "keep", "sample_tokens")
    changed = make_config(*(f"train.{key}=3" for key in keys), "train.logger=none")
    assert open_run(changed) == folder
    assert load_config(folder / "config.yaml") == config, "nothing was trained with these keys"
    record_config(changed)
    assert "checkpoint_every: 3" in (folder / "config.yaml").read_text()
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    moved = make_config(f"train.runs_dir={tmp_path / 'elsewhere'}")
    assert open_run(moved) == existing_run(moved) == tmp_path / "elsewhere/tiny"


def test_two_processes_do_not_train_one_run(make_config: MakeConfig, tmp_path: Path) -> None:
    config, other = make_config(), make_config("name=other")
    with locked(config), locked(other):
        with pytest.raises(RecipeError, match=r"name: another process is training in .*tiny; wait"):
            train(config, fresh=True)
        assert not (tmp_path / "runs/tiny").exists()
    with pytest.raises(ValueError, match="of a run"), locked(config):
        raise ValueError("the end of a run")
    with locked(config):
        pass
    assert not list((tmp_path / "runs").iterdir())


def test_a_run_older_than_a_key_had_its_default(make_config: MakeConfig) -> None:
    path = open_run(make_config()) / "config.yaml"
    tree = yaml.safe_load(path.read_text("utf-8"))
    path.with_name("metrics.jsonl").touch()
    del tree["recipe"], tree["optimizer"]["clip_norm"]
    path.write_text(yaml.safe_dump(tree), "utf-8")
    open_run(make_config())
    path.write_text(yaml.safe_dump(tree), "utf-8")
    with pytest.raises(RecipeError, match=r"optimizer\.clip_norm: None -> 1\.0"):
        open_run(make_config("optimizer.clip_norm=1.0"))


def test_an_earlier_run_keeps_its_layers_one_by_one(make_config: MakeConfig) -> None:
    words = ("model.library=unitscale", "optimizer.umup=true", "model.layers=8")
    path = open_run(make_config(*words, "model.scan=false")) / "config.yaml"
    path.with_name("metrics.jsonl").touch()
    again = make_config(*words)
    assert again.model.scan is False
    open_run(again)
    assert make_config(*words, "name=other").model.scan == "auto"
    assert make_config(*words, "model.layers=9").model.scan == "auto"
    patterns = make_config(*words, "name=other", "precision.layers={'stack.layers.0': float16}")
    assert patterns.model.scan is False
    tree = yaml.safe_load(path.read_text("utf-8"))
    del tree["model"]["scan"]
    path.write_text(yaml.safe_dump(tree), "utf-8")
    assert load_config(path).model.scan is False


def test_every_changed_key_is_listed(make_config: MakeConfig) -> None:
    (open_run(make_config()) / "metrics.jsonl").touch()
    with pytest.raises(RecipeError, match=r"\n  seed: 0 -> 3\n  train.steps: 6 -> 9\n.*init=/"):
        open_run(make_config("seed=3", "train.steps=9"))
    other = make_config("precision.policy=float16")
    with pytest.raises(RecipeError, match=r"precision.policy: float32 -> float16\n.*--convert"):
        open_run(other)
    folder = open_run(other, convert=True)
    record_config(other)
    with pytest.raises(RecipeError, match=r"\n  train.eval_batches: 2 -> 3\n"):
        open_run(make_config("train.eval_batches=3"))
    moved = folder.rename(folder.with_name("moved"))
    assert open_run(other.model_copy(update={"name": "moved"})) == moved
    moved.rename(folder)
    with pytest.raises(RecipeError, match="which is init; change name"):
        open_run(other.model_copy(update={"init": str(folder)}), fresh=True)


def test_a_start_that_failed_binds_nobody_and_fresh_moves_aside(make_config: MakeConfig) -> None:
    open_run(make_config("seed=3"))
    folder = open_run(make_config("seed=4"))
    (folder / "metrics.jsonl").touch()
    with pytest.raises(RecipeError, match="seed: 4 -> 5"):
        open_run(make_config("seed=5"))
    for number in (1, 2):
        (folder / "mark").write_text(str(number))
        assert open_run(make_config("seed=9"), fresh=True) == folder
        assert (folder.with_name(f"tiny.old-{number}") / "mark").read_text() == str(number)
        assert not (folder / "mark").exists()


def test_a_folder_that_is_no_run(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = tmp_path / "runs/tiny"
    folder.mkdir(parents=True)
    assert open_run(make_config()) == folder  # empty: as good as none
    (folder / "config.yaml").unlink()
    (folder / "thesis.txt").write_text("x")
    for fresh in (False, True):
        with pytest.raises(RecipeError, match=r"exists but is not a run .*; change name"):
            open_run(make_config(), fresh=fresh)
    for damaged in (b"- damaged", b"a: [", b"\xff\xfe\x00"):
        (folder / "config.yaml").write_bytes(damaged)
        for opened in (open_run, existing_run):
            with pytest.raises(RecipeError, match=r"config.yaml: expected the config of a run of"):
                opened(make_config())


def test_only_model_and_formats_matter_to_an_existing_run(make_config: MakeConfig) -> None:
    with pytest.raises(RecipeError, match=r"no run at .*train it first"):
        existing_run(make_config())
    folder = open_run(make_config())
    assert existing_run(make_config("data.batch_size=2", "train.steps=5")) == folder
    for word, changed in {
        "precision.policy=float16": r"precision\.policy: float32 -> float16",
        "model.width=8": r"model\.width: 16 -> 8",
        "precision=scalify_float16": r"precision\.scalify: None -> float16",
        "precision.layers={'*.out': bfloat16}": r"precision\.layers\.\*\.out: None -> bfloat16",
    }.items():
        with pytest.raises(RecipeError, match=f"  {changed}\n"):
            existing_run(make_config(word))
    open_run(make_config("precision=scalify_float16", "name=other"))
    with pytest.raises(RecipeError, match=r"  precision\.scalify: float16 -> None\n"):
        existing_run(make_config("name=other"))


class Refusal(Exception):
    """Raised by a fake package that cannot start a run."""


@pytest.fixture(params=["wandb", "mlflow"])
def logger(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def package(logger: str, monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A fake package that records calls."""
    package = MagicMock(Error=Refusal, MlflowException=Refusal)
    package.start_run.return_value.info.run_id = "made"
    monkeypatch.setitem(sys.modules, logger, package)
    return package


def scalars(folder: Path, tag: str) -> dict[int, float]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_resuming_drops_what_is_computed_again(make_config: MakeConfig) -> None:
    folder = open_run(config := make_config())
    path = folder / "metrics.jsonl"
    assert read_metrics(path) == []
    metrics = open_metrics(config, folder, 0)
    for step in (1, 2, 3):
        metrics.write(step, loss=float(step), speed=9.0)
        # At once, in both files.
        assert read_metrics(path)[-1] == {"step": step, "loss": float(step), "speed": 9.0}
        assert scalars(folder, "loss")[step] == step
    metrics.close()
    with path.open("ab") as file:
        file.write(b'{"step": 4, "lo\xff')  # the crash
    metrics = open_metrics(config, folder, 2)
    metrics.write(3, loss=30.0)
    metrics.close()
    expected = {1: 1.0, 2: 2.0, 3: 30.0}
    assert {row["step"]: row["loss"] for row in read_metrics(path)} == expected
    assert scalars(folder, "loss") == expected


def test_a_run_and_its_sequel(logger: str, package: MagicMock, make_config: MakeConfig) -> None:
    """All metrics have the run's id; a new run of the same name gets a new id."""
    wandb = logger == "wandb"
    start = package.init if wandb else package.start_run
    log = package.init().log if wandb else package.log_metrics
    start.reset_mock()
    config = make_config(f"train.logger={logger}")
    folder = open_run(config)
    for step in (1, 2):
        metrics = open_metrics(config, folder, step - 1)
        metrics.write(step, **{"loss": 0.5, "saturated/body[0].up": step})
        metrics.close()
    assert (package.init().finish if wandb else package.end_run).call_count == 2
    told = [{**each.kwargs, **each.args[0]} for each in log.call_args_list]
    first, second = start.call_args_list[:2]
    if wandb:
        assert told == read_metrics(folder / "metrics.jsonl")
        given = {"name": "tiny", "resume": "allow", "dir": str(folder)}
        assert first.kwargs == given | {"id": first.kwargs["id"], "config": config.model_dump()}
        assert second == first
    else:
        assert told == [{"step": n, "loss": 0.5, "saturated/body_0_.up": n} for n in (1, 2)]
        assert first == call(run_id=None, run_name="tiny")
        assert second == call(run_id="made", run_name="tiny")
        parameters = [each.args[0] for each in package.log_params.call_args_list]
        assert max(map(len, parameters)) <= 100
        merged = {key: value for part in parameters for key, value in part.items()}
        assert len(merged) == sum(map(len, parameters))  # written once
        assert merged["optimizer.learning_rate"] == "0.01"
    folder.rename(folder.with_name("aside"))
    open_metrics(config, open_run(config), 0).close()
    assert start.call_args != second


def test_a_logger_that_cannot_start(
    logger: str, package: MagicMock, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.init.side_effect = package.start_run.side_effect = Refusal("no key")
    config = make_config(f"train.logger={logger}")
    with pytest.raises(RecipeError, match=rf"train\.logger: {logger} could not start .*: no key"):
        open_metrics(config, open_run(config), 0)
    monkeypatch.setitem(sys.modules, logger, None)
    with pytest.raises(RecipeError, match=rf"train\.logger: {logger} .*pip install {logger}"):
        open_metrics(config, open_run(config), 0)


def test_a_loss_in_words() -> None:
    found = shown(GPTConfig(name="a"), 2 * log(2), 4.0)
    assert found == "1.3863 nats per token, 2.0000 bits, 0.5000 bits per byte"
