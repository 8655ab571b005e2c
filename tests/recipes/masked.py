"""A BERT's run so small that training it takes a second or two after compilation."""

from pathlib import Path
from typing import Any

import yaml

from recipes.bert.config import BertConfig
from recipes.bert.task import load_data
from recipes.registry import load_config
from recipes.run.checkpoint import Checkpoints
from recipes.run.convert import formats
from recipes.run.folder import open_run
from recipes.run.state import init_state

from .conftest import TEXT, short_training


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
        "train": short_training(folder),
    }
    path = folder / "tiny-bert.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def bert_config(path: Path, *overrides: str) -> BertConfig:
    """The tiny config with overrides."""
    config = load_config(path, overrides)
    assert isinstance(config, BertConfig)
    return config


def write_run(folder: Path) -> Path:
    """Writes a run of such a BERT that has positions for 32 tokens; returns its folder.

    Its weights are those at initialisation, for which no training step has to be compiled.
    """
    config = bert_config(write_bert(folder), "data.sequence_length=32")
    run = open_run(config)
    load_data(config).save(run)
    checkpoints = Checkpoints(run)
    facts = {"formats": formats(config), "text": ""}
    checkpoints.save(0, init_state(config)[2], {}, facts)
    checkpoints.close()
    return run
