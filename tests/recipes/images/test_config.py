"""The shipped configs of the image recipe, its keys, and `train` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from recipes.cli import main
from recipes.registry import RECIPES, dump_config, load_any_config, load_config, valid_keys
from recipes.errors import RecipeError
from recipes.images.config import DataConfig, MnistConfig

from .idx import write_config

SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "mnist").glob("*.yaml"))
FILES = [f"data.{name}={name}" for name in DataConfig.model_fields if "_" in name][:4]


def test_shipped_configs() -> None:
    assert [path.stem for path in SHIPPED] == ["cnn", "mlp"]
    for path in SHIPPED:
        config = load_any_config(path, FILES)
        assert isinstance(config, MnistConfig)
        assert config.name == config.model.kind == path.stem


def test_shipped_configs_ask_for_the_files() -> None:
    with pytest.raises(RecipeError) as caught:
        load_any_config(SHIPPED[0])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert lines[0].endswith(
        "data.train_images: expected a value; got none; set it: "
        "path of the idx file of the training images"
    )


def test_every_key_is_described() -> None:
    missing = [key for key, field in valid_keys(MnistConfig) if not field.description]
    assert not missing


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def test_config_is_frozen_and_reads_back(config_file: Path, tmp_path: Path) -> None:
    config = load_any_config(config_file, ["data.classes=5"])
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1
    path = tmp_path / "dumped.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_any_config(path) == config


# overrides, and what the message has to say
WRONG = [
    (["format=fp16"], r"format \(plain for .*'fp8'; got 'fp16'; did you mean fp8\?"),
    (["fromat=fp8"], r"fromat is not a key of the config; did you mean format\?"),
    (["train.steps=5"], r"train\.steps is not a key of the config; did you mean train\.epochs\?"),
    (
        ["train.zzz=5"],
        r"train\.zzz is not a key .*; train has the keys epochs, log_every, runs_dir",
    ),
    (["policy=fp8"], r"policy is not a key .*; the top-level keys are recipe, name, seed, format"),
    (["model={kind: rnn}"], r"model\.kind \(dense layers .*'mlp' or 'cnn'; got 'rnn'"),
    (["data.train_image=x"], r"data\.train_image .*did you mean data\.train_images\?"),
    (["data.train_images=7"], r"data\.train_images .*expected a valid string; got 7"),
    (["data.batch_size=0"], r"data\.batch_size .*greater than 0; got 0"),
    (["data.classes=0"], r"data\.classes .*greater than 0; got 0"),
    (["optimizer.momentum=1"], r"optimizer\.momentum .*less than 1; got 1"),
    (["optimizer.name=adamw"], r"optimizer\.name .*did you mean adam\?"),
    (["recipe=gpt"], r"recipe \(which recipe this config is of\): expected 'mnist'; got 'gpt'"),
]


@pytest.mark.parametrize(("overrides", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_value(config_file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        load_any_config(config_file, overrides)
    assert caught.value.exit_code == 2


UNKNOWN = [
    ("mnsit", r"'mnsit'; did you mean mnist\?"),
    ("zzz", r"'zzz'; correct the value"),
    ("[mnist]", r"\['mnist'\]"),
    ("null", r"None; correct the value"),
]


@pytest.mark.parametrize(("name", "got"), UNKNOWN)
def test_unknown_recipe(tmp_path: Path, name: str, got: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(f"recipe: {name}\nname: x\n", encoding="utf-8")
    known = ", ".join(RECIPES)
    with pytest.raises(RecipeError, match=f"recipe: expected one of {known}; got {got}"):
        load_any_config(path)


def test_a_config_of_another_recipe(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecipeError, match=r"expected a config of recipe gpt; got recipe mnist"):
        load_config(config_file)
    for command in ("evaluate", "generate"):
        assert main([command, str(config_file)]) == 2
        assert "expected a config of" in (message := capsys.readouterr().err)
        assert "got recipe mnist" in message


def test_train(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", str(config_file), "train.epochs=1"]
    assert main(words) == 0
    assert "test accuracy" in capsys.readouterr().out.splitlines()[-1]
    assert main([*words, "seed=1"]) == 2
    assert "seed: 0 -> 1" in capsys.readouterr().err
    assert main([*words, "seed=1", "--fresh"]) == 0
    assert (config_file.parent / "runs" / "tiny.old-1" / "metrics.jsonl").exists()


def test_a_file_that_is_missing(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config_file), "data.test_labels=/nowhere"]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: data.test_labels: /nowhere does not exist; give the path")
    assert not output.out
    assert not (config_file.parent / "runs").exists()
