"""The shipped configs of the images recipe, its keys, and its commands."""

from pathlib import Path

import pytest

from recipes.cli import main
from recipes.errors import RecipeError
from recipes.images.config import ImagesConfig
from recipes.registry import load_config, load_kind

from ..configs import CONFIGS, FILES, refuses_configs
from ..idx import write_config

SHIPPED = [CONFIGS / "mnist/cnn.yaml", CONFIGS / "mnist/mlp.yaml", CONFIGS / "images/vit.yaml"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs(path: Path) -> None:
    config = load_kind(ImagesConfig, path, FILES["images"])
    assert config.name == config.model.kind == path.stem
    epoch = 60_000 // config.data.batch_size
    assert config.train.steps % epoch == 0
    assert config.train.eval_every == epoch
    with pytest.raises(RecipeError) as caught:
        load_config(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert lines[0].endswith(
        "data.train_images: expected a value; got none; set it: "
        "path of the idx file of the training images"
    )


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_config(tmp_path)


VIT = "model.kind=vit"
# overrides, and what the message has to say
WRONG = [
    (["format=fp8"], r"format is no longer a key of the config; set precision\.scalify"),
    (["train.epochs=5"], r"train\.epochs is no longer a key of the config; set train\.steps"),
    (["optimizer.momentum=0.5"], r"optimizer\.momentum is no longer .*; set optimizer\.b1"),
    (
        ["precision.policy=fp8"],
        r"policy is of unitscale models; got fp8 and model\.kind mlp, a plain model",
    ),
    (["optimizer.umup=true"], r"optimizer\.umup is for unitscale models; got model\.kind mlp"),
    (
        [VIT, "precision=scalify_float16"],
        r"are for plain models; got model\.kind vit, a unitscale model",
    ),
    ([VIT, "model.heads=3"], r"model: heads must divide width; got 3 and 8"),
    (["model={kind: rnn}"], r"model\.kind \(dense layers .*'mlp', 'cnn' or 'vit'; got 'rnn'"),
    (["data.train_image=x"], r"data\.train_image .*did you mean data\.train_images\?"),
    (["recipe=gpt"], r"recipe \(which recipe this config is of\): expected 'images'; got 'gpt'"),
]


test_wrong_value = refuses_configs(WRONG)
UNKNOWN = [
    ("imges", r"'imges'; did you mean images\?"),
    ("[images]", r"\['images'\]"),
    ("mnist", "'mnist'; did you mean images"),
]
UNKNOWN += [("zzz", r"'zzz'; correct the value"), ("null", r"None; correct the value")]


@pytest.mark.parametrize(("name", "got"), UNKNOWN)
def test_unknown_recipe(tmp_path: Path, name: str, got: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(f"recipe: {name}\nname: x\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=f"recipe: expected one of gpt, .*; got {got}"):
        load_config(path)


@pytest.mark.slow
@pytest.mark.usefixtures("plots")
def test_commands(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(config_file), "train.steps=6"]
    assert main(["train", *words]) == 0
    trained = capsys.readouterr().out.splitlines()
    assert trained[-2].startswith("accuracy ")
    names = {path.name for path in (config_file.parent / "runs" / "tiny").iterdir()}
    assert names == {
        *("config.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "scores.json"),
        *("loss.png", "rms.png"),
    }
    assert main(["evaluate", *words]) == 0
    loss, accuracy = capsys.readouterr().out.splitlines()
    assert (
        trained[-3]
        == f"{loss.removeprefix('step 6  ')} (of at most 16 batches; evaluate takes all)"
    )
    assert loss.endswith(" nats per image")
    assert accuracy == trained[-2]
    assert main(["train", *words, "seed=1"]) == 2
    assert "seed: 0 -> 1" in capsys.readouterr().err
    assert main(["generate", *words]) == 2
    assert "expected a model that continues text; got one of recipe" in capsys.readouterr().err
    assert main(["describe", *words]) == 0
    assert "16 images in 16 examples" in capsys.readouterr().out


def test_a_file_that_is_missing(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config_file), "data.test_labels=/nowhere"]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: data.test_labels: /nowhere cannot be read: No such file")
    assert not output.out
    assert not (config_file.parent / "runs").exists()
