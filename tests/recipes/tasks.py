"""Files and configs of two small tasks, on which fine-tuning takes a second or two."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from recipes.config import PrecisionConfig
from recipes.finetune.config import FinetuneConfig
from recipes.finetune.task import TaskData
from recipes.registry import load_kind
from recipes.run.step import predict

FILES = {"squad": "squad.json", "classification": "rows.tsv"}
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
    (folder / FILES["squad"]).write_text(json.dumps(squad(ANIMALS)), encoding="utf-8")
    lines = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in ROWS)]
    (folder / FILES["classification"]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    for task, file in FILES.items():
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
            "squad": {"max_question_length": 8},
            "dropout": 0.0,
            "optimizer": {"learning_rate": 0.1},
            "train": {
                "steps": 4,
                "eval_every": 100,
                "eval_batches": 1,
                "checkpoint_every": 100,
                "log_every": 100,
                "runs_dir": str(folder / "runs"),
            },
        }
        (folder / f"{task}.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")


def tuned(folder: Path, task: str, *overrides: str) -> FinetuneConfig:
    """Load the config of a task with overrides."""
    return load_kind(FinetuneConfig, folder / f"{task}.yaml", overrides)


def logits(model: Any, data: TaskData, scalify: PrecisionConfig | None = None) -> np.ndarray:
    """Return a model's outputs for the validation records."""
    batches = data.scored.batches(len(data.scored))
    return predict(model, (tuple(batch.values())[:3] for batch in batches), scalify)
