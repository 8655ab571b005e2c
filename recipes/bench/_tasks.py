"""What fine-tuning needs to be told of a pretrained model and of the files of a task."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..atomic import write_whole
from ..config import RunConfig
from ..errors import RecipeError, read_text, refused
from ..finetune.config import ClassificationConfig, DataConfig
from ..finetune.rows import load_classification
from ..finetune.squad_data import read_squad
from ..run.folder import run_folder

HELD_OUT = 8
"""One of so many articles is kept for validation."""

_BARE = {"header": False, "text": 0, "label": 1}  # columns of a file that does not name them


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
    words = [f"data.train={train}", f"data.validation={validation}"]
    return words if _named(train) else [*words, f"classification={json.dumps(_BARE)}"]


def question_words(train: Path, validation: Path, positions: int | None) -> list[str]:
    """Overrides for a split SQuAD file; of few positions a question takes at most a third."""
    words = [f"data.train={train}", f"data.validation={validation}"]
    return words if positions is None else [*words, f"squad.max_question_length={positions // 3}"]


def tuned_words(pretrained: RunConfig) -> list[str]:
    """Overrides of a run that starts from a pretrained one, and lies beside it."""
    folder = run_folder(pretrained)
    words, longest = [f"init={folder}", f"train.runs_dir={folder.parent}"], pretrained.longest
    return words if longest is None else [*words, f"data.sequence_length={longest}"]


def sentences(train: str, validation: str) -> list[str]:
    """The texts to train on of SST-2's files."""
    columns = ClassificationConfig() if _named(train) else ClassificationConfig(**_BARE)
    rows = load_classification(DataConfig(train=train, validation=validation), columns).train
    return [row.text for row in rows]


def contexts(train: Path) -> list[str]:
    """The paragraphs of a SQuAD file."""
    return [question.context for question in read_squad(str(train))]


def adapted_words(config: RunConfig, data: str, texts: Mapping[str, Iterable[str]]) -> list[str]:
    """Overrides of pretraining on tasks' texts too: half of a batch, the other half is of `data`.

    The texts are written beside the runs. A model that has read what it will be tuned on scores
    higher (Gururangan et al. 2020, "Don't Stop Pretraining").
    """
    mixture = {data: float(len(texts))}
    for task, found in texts.items():
        path = Path(config.train.runs_dir) / f"{config.name}-{task}.txt"
        with refused(f"train.runs_dir: cannot write {path}", "free space, or change it"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, "\n\n".join(dict.fromkeys(found)) + "\n")
        mixture[str(path)] = 1.0
    words = [f"name={config.name}-adapted", "data.path=null"]
    return [*words, f"data.mixture={json.dumps(mixture)}"]


def _named(train: str) -> bool:
    """Whether the first line names columns, as those of GLUE do."""
    return "label" in read_text(Path(train), "--sst2").partition("\n")[0].split("\t")
