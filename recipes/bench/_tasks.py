"""What fine-tuning needs to be told of a pretrained model and of the files of a task."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ..atomic import write_whole
from ..config import RunConfig
from ..errors import RecipeError, read_text, refused
from ..finetune.classification import load_classification
from ..finetune.config import ClassificationConfig, DataConfig
from ..finetune.squad import Question, read_squad
from ..run.folder import run_folder

HELD_OUT = 8
"""One of so many articles is kept for validation."""

_SENTENCES = re.compile(r"(?<=[.!?])\s+")
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


def task_words(
    sst2: tuple[str, str] | None,
    articles: tuple[Path, Path] | None,
    positions: int | None,
    *,
    pairs: bool = False,
) -> dict[str, list[str]]:
    """Overrides of tuning on each task whose files are given, for a model of so many positions."""
    found: dict[str, list[str]] = {}
    if sst2:
        found["sst2"] = sentence_words(*sst2)
    if articles:
        found["squad"] = question_words(*articles, positions)
    if articles and pairs:
        found["pairs"] = pair_words(*articles)
    return found


def sentence_words(train: str, validation: str) -> list[str]:
    """Overrides for SST-2's files: GLUE's, which name columns, or sentence and label alone."""
    words = [f"data.train={train}", f"data.validation={validation}"]
    return words if _named(train) else [*words, f"classification={json.dumps(_BARE)}"]


def question_words(train: Path, validation: Path, positions: int | None) -> list[str]:
    """Overrides for a split SQuAD file; of few positions a question takes at most a third."""
    words = [f"data.train={train}", f"data.validation={validation}"]
    return words if positions is None else [*words, f"squad.max_question_length={positions // 3}"]


def pair_words(train: Path, validation: Path) -> list[str]:
    """Overrides for pairs made of a split SQuAD file, which are written beside it.

    As QNLI is made of SQuAD (Wang et al. 2018, "GLUE"): does the sentence answer the question? Each
    question stands beside the sentence of its context that does and beside another one.
    """
    words = []
    for key, path in (("data.train", train), ("data.validation", validation)):
        rng = np.random.default_rng(0)
        rows = [row for question in read_squad(path) for row in pairs_of(question, rng)]
        lines = ["question\tsentence\tlabel", *rows]
        with refused(f"train.runs_dir: cannot write {path.parent}", "free space, or change it"):
            write_whole(path.with_suffix(".tsv"), "\n".join(lines) + "\n")
        words.append(f"{key}={path.with_suffix('.tsv')}")
    return words


def pairs_of(question: Question, rng: np.random.Generator) -> list[str]:
    """Rows of a question: the sentence with its answer, 1, and one without, 0; or none.

    There is none without an answer, where two sentences share it, and where no other is.
    """
    context = question.context
    parts = [part for part in sentences_of(context) if context[part].strip()]
    answers = [(answer.start, answer.start + len(answer.text)) for answer in question.answers]
    held = [p for p in parts if any(p.start <= a and b <= p.stop for a, b in answers)]
    others = [p for p in parts if all(b <= p.start or p.stop <= a for a, b in answers)]
    if not (held and others):
        return []
    chosen = held[0], others[rng.integers(len(others))]
    texts = [" ".join(text.split()) for text in (question.text, *(context[p] for p in chosen))]
    return [f"{texts[0]}\t{texts[1]}\t1", f"{texts[0]}\t{texts[2]}\t0"]


def sentences_of(text: str) -> list[slice]:
    """Where the sentences of a text stand: they end in a full stop or the like and a space."""
    gaps = [found.span() for found in _SENTENCES.finditer(text)]
    starts, ends = [0, *(end for _, end in gaps)], [*(start for start, _ in gaps), len(text)]
    return [slice(start, end) for start, end in zip(starts, ends, strict=True)]


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
