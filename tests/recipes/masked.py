"""Configs of a BERT that trains in a second or two after compilation."""

from pathlib import Path
from typing import Any

import yaml

from recipes.bert.config import BertConfig
from recipes.bert.task import load_data
from recipes.registry import load_config
from recipes.run.folder import open_run

from .conftest import TEXT, short_training
from .runs import untrained


def write_bert(folder: Path) -> Path:
    """Write a text and a complete config to a folder; return the path of the config."""
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
        "train": short_training(folder),
    }
    path = folder / "tiny-bert.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def bert_config(path: Path, *overrides: str) -> BertConfig:
    """Load the tiny config with overrides."""
    config = load_config(path, overrides)
    assert isinstance(config, BertConfig)
    return config


def write_run(folder: Path) -> Path:
    """Write an untrained run of this BERT, with 32 learned positions; return its folder."""
    config = bert_config(write_bert(folder), "data.sequence_length=32")
    run = open_run(config)
    load_data(config).save(run)
    untrained(config, run)
    return run
