"""A BERT's run so small that training it takes a second or two after compilation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from recipes.bert.config import BertConfig
from recipes.configfile import load_any_config

from .conftest import TEXT


def write_bert(folder: Path) -> Path:
    """Writes a text and a complete config into a folder; returns the path of the config."""
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    tree: dict[str, Any] = {
        "recipe": "bert",
        "name": "tiny-bert",
        "data": {
            "path": str(folder / "text.txt"),
            "tokenizer": {"kind": "wordpiece", "vocab": 120, "lowercase": True},
            "cache_dir": str(folder / "cache"),
            "sequence_length": 16,
            "batch_size": 4,
        },
        "model": {"vocab": None, "width": 16, "layers": 1, "heads": 2, "dropout": 0.1},
        "optimizer": {"learning_rate": 0.3},
        "train": {
            "steps": 6,
            "eval_every": 3,
            "eval_batches": 2,
            "checkpoint_every": 3,
            "log_every": 1,
            "sample_tokens": 0,
            "runs_dir": str(folder / "runs"),
        },
    }
    path = folder / "tiny-bert.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def bert_config(path: Path, *overrides: str) -> BertConfig:
    """The tiny config with overrides."""
    config = load_any_config(path, overrides)
    assert isinstance(config, BertConfig)
    return config
