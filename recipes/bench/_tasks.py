"""What fine-tuning needs to be told of a pretrained model and of the files of a task."""

import json
from pathlib import Path

from ..atomic import write_whole
from ..config import RunConfig
from ..errors import RecipeError, read_text, refused
from ..finetune.squad_data import read_squad
from ..run.folder import run_folder

HELD_OUT = 8
"""One of so many articles is kept for validation."""


def split_articles(path: str, folder: Path) -> tuple[Path, Path]:
    """Writes a SQuAD file's articles to `train.json`, every eighth one to `validation.json`."""
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
    todo = "free space, or change train.runs_dir"
    with refused(f"train.runs_dir: cannot write {folder}", todo):
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            write_whole(folder / f"{name}.json", json.dumps(tree | {"data": part}))
    return folder / "train.json", folder / "validation.json"


def sentence_words(train: str, validation: str) -> list[str]:
    """Overrides for SST-2's files: GLUE's, which name columns, or sentence and label alone."""
    names = read_text(Path(train), "--sst2").partition("\n")[0].split("\t")
    words = [f"data.train={train}", f"data.validation={validation}"]
    if "label" in names:
        return words
    return [*words, "classification={header: false, text: 0, label: 1}"]


def question_words(train: Path, validation: Path, positions: int | None) -> list[str]:
    """Overrides for a split SQuAD file; of few positions a question takes at most a third."""
    words = [f"data.train={train}", f"data.validation={validation}"]
    return words if positions is None else [*words, f"squad.max_question_length={positions // 3}"]


def tuned_words(pretrained: RunConfig) -> list[str]:
    """Overrides of a run that starts from a pretrained one, and lies beside it."""
    folder = run_folder(pretrained)
    words, longest = [f"init={folder}", f"train.runs_dir={folder.parent}"], pretrained.longest
    return words if longest is None else [*words, f"data.sequence_length={longest}"]
