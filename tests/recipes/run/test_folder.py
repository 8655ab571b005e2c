"""The folder of a run accepts one config only, and no file in it is deleted."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from recipes.errors import RecipeError, write_whole
from recipes.gpt.config import GPTConfig
from recipes.registry import load_config
from recipes.run.folder import existing_run, locked, open_run
from recipes.train import train

MakeConfig = Callable[..., GPTConfig]


def test_made_once_opened_again_and_moved(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    folder = open_run(config)
    (folder / "metrics.jsonl").touch()
    assert open_run(config) == folder
    assert (folder / "metrics.jsonl").exists()
    assert load_config(folder / "config.yaml") == config
    keys = ("eval_every", "eval_batches", "checkpoint_every", "keep", "sample_tokens")
    changed = make_config(*(f"train.{key}=3" for key in keys), "train.logger=none")
    assert open_run(changed) == folder
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
    with pytest.raises(
        RecipeError, match=r"precision.policy: float32 -> float16\n.*--convert to resume"
    ):
        open_run(make_config("precision.policy=float16"))
    assert open_run(make_config("precision.policy=float16"), convert=True)


def test_a_start_that_failed_binds_nobody(make_config: MakeConfig) -> None:
    open_run(make_config("seed=3"))
    path = open_run(make_config("seed=4")) / "config.yaml"
    path.with_name("metrics.jsonl").touch()
    with pytest.raises(RecipeError, match="seed: 4 -> 5"):
        open_run(make_config("seed=5"))


def test_fresh_moves_aside(make_config: MakeConfig) -> None:
    folder = open_run(make_config())
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
    with pytest.raises(RecipeError, match=r"exists but is not a run .*; change name"):
        open_run(make_config())
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


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for text in ("first é\n", "old"):
        write_whole(path, text)
        assert path.read_bytes() == text.encode("utf-8")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text(encoding="utf-8") == "old"
    with pytest.raises(OSError, match="No such file"):
        write_whole(tmp_path / "gone/file.json", "text")
