"""Configs and data of small runs of every recipe, and a test for tables of invalid overrides."""

import gzip
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from recipes.bert.config import BertConfig
from recipes.bert.task import load_data
from recipes.charlm.config import CharlmConfig
from recipes.config import PrecisionConfig
from recipes.errors import RecipeError
from recipes.finetune.config import FinetuneConfig
from recipes.finetune.task import TaskData
from recipes.registry import load_config, load_kind
from recipes.run.folder import open_run
from recipes.run.step import predict

from .conftest import TEXT, short_training
from .runs import untrained

CONFIGS = Path(__file__).parents[2] / "configs"
REQUIRED = {
    "finetune": ["init=nowhere", "data.train=a", "data.validation=b"],
    "images": ["data.folder=x"],
}
"""Overrides for what the configs of a recipe leave to users."""


def refuses_configs(table: Sequence[tuple[str | list[str], str]]) -> Any:
    """Make a test that each row's overrides are refused with a matching message."""

    def test(config_file: Path) -> None:
        for overrides, message in table:
            words = [overrides] if isinstance(overrides, str) else overrides
            with pytest.raises(RecipeError, match=message) as caught:
                load_config(config_file, words)
            assert caught.value.exit_code == 2

    return test


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


def charlm_tree(folder: Path, **sections: Any) -> dict[str, Any]:
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


def charlm_config(folder: Path, **sections: Any) -> CharlmConfig:
    return CharlmConfig.model_validate(charlm_tree(folder, **sections))


def write_charlm(folder: Path, **sections: Any) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(charlm_tree(folder, **sections)), encoding="utf-8")
    return path


TASK_FILES = {"squad": "squad.json", "classification": "rows.tsv"}
ANIMALS = ["fox", "jumper", "line", "dog"] * 3
ROWS = [("quick fox", 1), ("lazy dogs", 0), ("brown fox", 1), ("lazy line", 0)] * 5


def squad(animals: list[str]) -> dict[str, Any]:
    """Make a SQuAD file with a paragraph and a question for each animal."""
    paragraphs = []
    for number, animal in enumerate(animals):
        context = f"the quick brown {animal} jumps over the lazy dogs"
        answer = {"text": animal, "answer_start": context.index(animal)}
        question = {"id": f"q{number}", "question": "what jumps", "answers": [answer]}
        paragraphs.append({"context": context, "qas": [question]})
    return {"version": "1.1", "data": [{"title": "animals", "paragraphs": paragraphs}]}


def write_tasks(folder: Path, init: Path) -> None:
    """Write `squad.yaml`, `classification.yaml` and their data files to a folder."""
    (folder / TASK_FILES["squad"]).write_text(json.dumps(squad(ANIMALS)), encoding="utf-8")
    lines = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in ROWS)]
    (folder / TASK_FILES["classification"]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    for task, file in TASK_FILES.items():
        tree = {
            "recipe": "finetune",
            "name": task,
            "init": str(init),
            "task": task,
            "data": {
                "train": str(folder / file),
                "validation": str(folder / file),
                "sequence_length": 24,
                "batch_size": 8,
            },
            "dropout": 0.0,
            "optimizer": {"learning_rate": 0.1},
            "train": short_training(folder) | {"steps": 4, "eval_batches": 1},
        }
        (folder / f"{task}.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")


def tuned(folder: Path, task: str, *overrides: str) -> FinetuneConfig:
    """Load the config of a task with overrides."""
    return load_kind(FinetuneConfig, folder / f"{task}.yaml", overrides)


def logits(model: Any, data: TaskData, scalify: PrecisionConfig | None = None) -> np.ndarray:
    """Return a model's outputs for the validation records."""
    batches = data.scored.batches(len(data.scored))
    return predict(model, (tuple(batch.values())[:3] for batch in batches), scalify)


CLASSES, HEIGHT, WIDTH = 3, 6, 5


def encode(array: np.ndarray) -> bytes:
    """Return the contents of an idx file of bytes."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def draw(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw noisy images with a bright band of rows for each class, which are easy to classify."""
    rng = np.random.default_rng(seed)
    labels = (np.arange(count) % CLASSES).astype(np.uint8)
    images = rng.integers(0, 100, (count, HEIGHT, WIDTH))
    for image, label in zip(images, labels, strict=True):
        image[2 * label : 2 * label + 2] += 150
    return images.astype(np.uint8), labels


def write_files(folder: Path) -> Path:
    """Write 96 training images and 20 compressed test images to a folder; return the folder."""
    for split, count, seed in (("train", 96, 5), ("t10k", 20, 4)):
        images, labels = draw(count, seed)
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(encode(images)))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(encode(labels))
    return folder


def write_images(folder: Path) -> Path:
    """Write the four files and a complete config of a tiny run; return the path of the config."""
    tree = {
        "recipe": "images",
        "name": "tiny",
        "data": {"folder": str(write_files(folder)), "batch_size": 16},
        "model": {"hidden": 16, "layers": 1, "channels": 4, "patch": 1, "width": 8, "heads": 2},
        "optimizer": {"name": "sgd", "learning_rate": 0.05, "schedule": "constant", "umup": False},
        "train": {"steps": 12, "eval_every": 6, "log_every": 4, "runs_dir": str(folder / "runs")},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
PIECES = "abcdefghijklmnopqrstuvwxyz0123456789.,?'"
WORDS = ("the", "copper", "mine", "opened", "in", "closed", "when", "did", "open")


def make_tokenizer() -> Tokenizer:
    """Make a lowercasing tokenizer with a token for each of `WORDS`; other words become letters."""
    tokens = [*SPECIAL, *WORDS, *PIECES, *(f"##{piece}" for piece in PIECES)]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocab[name]) for name in ("[CLS]", "[SEP]")],
    )
    return tokenizer
