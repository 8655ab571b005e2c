"""A run so small that training it takes a second or two after compilation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.config import Config
from recipes.configfile import load_config

TEXT = "".join(f"line {i}: the quick brown fox jumps over {i * i} lazy dogs\n" for i in range(200))


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def config_file(tmp_path: Path, text_file: Path) -> Path:
    """A complete config, on disk."""
    tree: dict[str, Any] = {
        "name": "tiny",
        "data": {"path": str(text_file), "sequence_length": 16, "batch_size": 4},
        "model": {"library": "plain", "width": 16, "layers": 1, "heads": 2, "dropout": 0.1},
        "optimizer": {"umup": False, "learning_rate": 1e-2},
        "train": {
            "steps": 6,
            "eval_every": 3,
            "eval_batches": 2,
            "checkpoint_every": 3,
            "log_every": 1,
            "sample_tokens": 0,
            "runs_dir": str(tmp_path / "runs"),
        },
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


@pytest.fixture
def make_config(config_file: Path) -> Callable[..., Config]:
    """The tiny config with overrides: `make_config("train.steps=3")`."""
    return lambda *overrides: load_config(config_file, overrides)
