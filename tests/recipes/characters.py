"""Configs of a tiny character model."""

from pathlib import Path
from typing import Any

import yaml

from recipes.charlm.config import CharlmConfig

from .conftest import TEXT, short_training


def tree(folder: Path, **sections: Any) -> dict[str, Any]:
    """Write a config of three steps, and its text, to a folder; `sections` update the config."""
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    base: dict[str, Any] = {
        "recipe": "charlm",
        "name": "tiny",
        "data": {"path": str(folder / "text.txt"), "sequence_length": 6, "batch_size": 2},
        "model": {"width": 8, "layers": 1, "heads": 2, "kind": "attention", "norm": "none"},
        "train": short_training(folder) | {"steps": 3, "eval_batches": 1},
        "sweep": {"rates": 3, "rounds": 1},
    }
    return base | {
        key: base.get(key, {}) | value if isinstance(value, dict) else value
        for key, value in sections.items()
    }


def make(folder: Path, **sections: Any) -> CharlmConfig:
    return CharlmConfig.model_validate(tree(folder, **sections))


def write(folder: Path, **sections: Any) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree(folder, **sections)), encoding="utf-8")
    return path
