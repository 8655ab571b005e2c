"""Logits of imported weights against those that `transformers` gives, as saved beside them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..errors import RecipeError
from ..hf import load
from ..registry import CONFIGS
from ._table import Table, asked

REFERENCE = "reference.npz"
FIXTURES = CONFIGS.parent / "tests" / "recipes" / "pretrained_fixtures"
MOST_DIFFERENCE = 1e-4
_INPUTS = {"input_ids": "ids", "token_type_ids": "segments", "attention_mask": "mask"}


def folders(given: Iterable[Path]) -> list[Path]:
    """The folders to compare: those given, or the small ones of the tests, if they are there."""
    found = list(given) or sorted(file.parent for file in FIXTURES.glob(f"*/{REFERENCE}"))
    for folder in found:
        if not (folder / REFERENCE).is_file():
            raise RecipeError(
                f"--logits: expected a folder with {REFERENCE}, inputs and logits; got {folder}; "
                "make one with tests/recipes/make_pretrained_fixtures.py"
            )
    return found


def logits_table(compared: Iterable[Path]) -> Table:
    """The largest difference of any logit, for each folder."""
    rows: list[dict[str, Any]] = []
    for folder in compared:
        with np.load(folder / REFERENCE) as stored:
            inputs = {
                argument: stored[name].astype(np.int32)
                for name, argument in _INPUTS.items()
                if name in stored
            }
            expected = stored["logits"]
        pretrained = load(folder)
        model: Any = pretrained.model
        difference = float(np.abs(np.asarray(model(**inputs)) - expected).max())
        rows.append(
            {
                "folder": folder.name,
                "task": pretrained.task,
                "parameters": sum(leaf.size for leaf in jax.tree.leaves(pretrained.params)),
                "largest logit": float(np.abs(expected).max()),
                "difference": difference,
                **asked(difference, most=MOST_DIFFERENCE),
            }
        )
    return Table("Logits of imported weights in float32, against transformers", rows)
