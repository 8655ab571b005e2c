"""Scores of fine-tuned models by number format, over several seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..atomic import write_whole
from ..bert.config import BertConfig
from ..errors import RecipeError
from ..finetune.config import FinetuneConfig
from ..finetune.squad_data import read_squad
from ..finetune.task import SCORES
from ..registry import load_any_config
from ..run.folder import run_folder
from ._runs import finished
from ._table import Table, within

CONFIGS = Path(__file__).parents[2] / "configs" / "bert"
HELD_OUT = 8
"""One of so many articles is kept for validation."""


def split_articles(path: str, folder: Path) -> tuple[Path, Path]:
    """Writes every eighth article of a SQuAD file to `validation.json`, the others to `train.json`.

    Raises:
      RecipeError: The file is not that of a SQuAD, has fewer than eight articles, or the folder
        cannot be written.
    """
    read_squad(path, "--squad")
    tree = json.loads(Path(path).read_text(encoding="utf-8"))
    articles = tree["data"]
    if len(articles) < HELD_OUT:
        raise RecipeError(
            f"--squad: expected at least {HELD_OUT} articles, of which one is for validation; got "
            f"{len(articles)} in {path}; give a larger file"
        )
    parts = {"train": [], "validation": []}
    for index, article in enumerate(articles, 1):
        parts["train" if index % HELD_OUT else "validation"].append(article)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            write_whole(folder / f"{name}.json", json.dumps(tree | {"data": part}))
    except OSError as error:
        raise RecipeError(
            f"train.runs_dir: cannot write {folder}: {error.strerror}; free space, or change "
            "train.runs_dir"
        ) from error
    return folder / "train.json", folder / "validation.json"


def sentence_words(train: str, validation: str) -> list[str]:
    """Overrides for SST-2's files: GLUE's, which name their columns, or sentence and label alone.

    Raises:
      RecipeError: The training file cannot be read.
    """
    try:
        with Path(train).open(encoding="utf-8") as file:
            names = file.readline().rstrip("\n").split("\t")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"--sst2: cannot read {train}: {error}; give a TSV file") from error
    words = [f"data.train={train}", f"data.validation={validation}"]
    if "label" in names:
        return words
    return [*words, "classification={header: false, text: 0, label: 1}"]


def question_words(train: Path, validation: Path, positions: int) -> list[str]:
    """Overrides for a split SQuAD file; questions take at most a third of a window."""
    return [
        f"data.train={train}",
        f"data.validation={validation}",
        f"squad.max_question_length={positions // 3}",
    ]


def task_config(
    task: str, pretrained: BertConfig, seed: int, words: Iterable[str]
) -> FinetuneConfig:
    """The config of one fine-tuning run.

    Args:
      task: `sst2` or `squad`, the config's name.
      pretrained: The run to start from; its policy is the new run's.
      seed: Of the head, the order and dropout.
      words: Overrides.
    """
    folder = run_folder(pretrained)
    config = load_any_config(
        CONFIGS / f"{task}.yaml",
        [
            f"init={folder}",
            f"policy={pretrained.policy}",
            f"data.sequence_length={pretrained.context}",
            f"train.runs_dir={folder.parent}",
            f"name={folder.name}-{task}-{seed}",
            f"seed={seed}",
            *words,
        ],
    )
    assert isinstance(config, FinetuneConfig), "the configs of tasks are of that recipe"
    return config


def tuned_scores(config: FinetuneConfig, fresh: bool, console: Console) -> dict[str, float]:
    """Trains or resumes a run, if it is not finished; its scores by name.

    Raises:
      RecipeError: A signal stopped the run.
    """
    folder = finished(config, fresh, console).folder
    return json.loads((folder / SCORES).read_text(encoding="utf-8"))


def scores_table(found: Mapping[tuple[str, str], Sequence[float]]) -> Table:
    """Mean and spread of scores, by metric and policy, and the distance of each to float32.

    Asked is that a mean be no further below that of float32 than the seeds' spread: the root mean
    square of both formats' standard deviations.

    Args:
      found: Scores of each seed.
    """
    rows = []
    for (metric, policy), scores in found.items():
        row: dict[str, Any] = {
            "score": metric,
            "policy": policy,
            "seeds": len(scores),
            "mean": statistics.mean(scores),
        }
        if len(scores) > 1:
            row["standard deviation"] = statistics.stdev(scores)
        if policy != "float32":
            reference = found[metric, "float32"]
            row["over float32"] = row["mean"] - statistics.mean(reference)
            if len(scores) > 1:
                variances = statistics.variance(scores), statistics.variance(reference)
                spread = math.sqrt(statistics.mean(variances))
                row["asked"] = f">= -{spread:.3f}"
                row["within"] = within(row["over float32"], (-spread, None))
        rows.append(row)
    columns = {
        "score": "",
        "policy": "",
        "seeds": "d",
        "mean": ".3f",
        "standard deviation": ".3f",
        "over float32": "+.3f",
        "asked": "",
        "within": "",
    }
    return Table("Scores of fine-tuned models in percent, over seeds", columns, rows)
