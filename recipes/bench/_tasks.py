"""What fine-tuning needs to be told of a pretrained model and of the files of a task."""

from __future__ import annotations

import json
from pathlib import Path

from ..atomic import write_whole
from ..config import RunConfig
from ..errors import RecipeError
from ..finetune.squad_data import read_squad
from ..run.folder import run_folder

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


def tuned_words(pretrained: RunConfig) -> list[str]:
    """Overrides of a run that starts from a pretrained one, and lies beside it."""
    folder = run_folder(pretrained)
    return [
        f"init={folder}",
        f"data.sequence_length={pretrained.longest}",
        f"train.runs_dir={folder.parent}",
    ]
