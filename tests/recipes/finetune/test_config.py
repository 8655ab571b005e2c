"""The keys of a fine-tuning task, and which of their values go together."""

from typing import Any

import pytest
from pydantic import ValidationError

from recipes.finetune.config import ClassificationConfig, FinetuneConfig

FILES = {"train": "train.json", "validation": "dev.json"}
RUN = {"recipe": "finetune", "name": "task", "init": "run"}


def test_defaults_are_those_of_the_files_that_are_published() -> None:
    config = FinetuneConfig.model_validate({**RUN, "task": "squad", "data": FILES})
    assert (config.squad.n_best, config.squad.max_answer_length) == (20, 30)
    columns = config.classification
    assert (columns.header, columns.text, columns.pair, columns.label) == (
        True,
        "sentence",
        None,
        "label",
    )


def test_columns_are_names_or_positions() -> None:
    columns = ClassificationConfig(header=False, text=0, pair=2, label=1)
    assert (columns.text, columns.pair, columns.label) == (0, 2, 1)


# section, its values, and what the message has to say
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("data", {"format": "tsv"}, r"data\.format of task squad must be squad; got tsv"),
    ("data", {"format": "xml"}, r"data\.format"),
    ("data", {"sequence_length": 0}, r"data\.sequence_length"),
    ("squad", {"version": "v1.2"}, r"squad\.version"),
    ("squad", {"stride": 0}, r"squad\.stride"),
    ("squad", {"n_best": True}, r"squad\.n_best"),
    ("squad", {"no_answer_threshold": float("inf")}, r"squad\.no_answer_threshold"),
    ("squad", {"treshold": 1.0}, r"squad\.treshold"),
    ("classification", {"text": -1}, r"classification\.text"),
    ("classification", {"text": True}, r"classification\.text"),
    ("classification", {"labels": ["yes"]}, r"classification\.labels"),
    ("classification", {"labels": ["yes", "yes"]}, r"labels must be different names"),
    ("classification", {"pair": "label"}, r"must be different columns; got text 'sentence', pair"),
]


@pytest.mark.parametrize(("section", "values", "message"), WRONG)
def test_wrong_values(section: str, values: dict[str, Any], message: str) -> None:
    tree: dict[str, Any] = {**RUN, "task": "squad", "data": dict(FILES)}
    tree[section] = tree.get(section, {}) | values
    with pytest.raises(ValidationError, match=message):
        FinetuneConfig.model_validate(tree)


def test_the_formats_of_classification() -> None:
    tree = {**RUN, "task": "classification", "data": {**FILES, "format": "squad"}}
    with pytest.raises(ValidationError, match=r"task classification must be tsv, csv or jsonl"):
        FinetuneConfig.model_validate(tree)
