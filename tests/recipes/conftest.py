"""Fixtures for a GPT that trains in a second or two after compilation."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.gpt.config import GPTConfig
from recipes.registry import load_config

from .runs import without_plots

TEXT = "".join(f"line {i}: the quick brown fox jumps over {i * i} lazy dogs\n" for i in range(200))


MakeConfig = Callable[..., GPTConfig]


@pytest.fixture(scope="session", autouse=True)
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cache tokens in a temporary folder, not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    without_plots(monkeypatch.setattr)


def short_training(folder: Path) -> dict[str, Any]:
    """Make a `train` section of a few steps, with runs in a folder."""
    return {
        "steps": 6,
        "eval_every": 3,
        "eval_batches": 2,
        "checkpoint_every": 3,
        "log_every": 1,
        "sample_tokens": 0,
        "runs_dir": str(folder / "runs"),
    }


def write_config(folder: Path) -> Path:
    """Write a text and a complete config to a folder; return the path of the config."""
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    tree: dict[str, Any] = {
        "name": "tiny",
        "data": {"path": str(folder / "text.txt"), "sequence_length": 16, "batch_size": 4},
        "model": {"library": "plain", "width": 16, "layers": 1, "heads": 2, "dropout": 0.1},
        "optimizer": {"umup": False, "learning_rate": 1e-2},
        "train": short_training(folder),
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_config(tmp_path)


@pytest.fixture
def make_config(config_file: Path) -> MakeConfig:
    """Load the tiny config with overrides: `make_config("train.steps=3")`."""
    return lambda *overrides: load_config(config_file, overrides)
