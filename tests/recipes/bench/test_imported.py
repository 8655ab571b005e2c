"""Logits of imported weights beside saved ones, and what is said where they differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recipes.bench._imported import FIXTURES, REFERENCE, folders, logits_table
from recipes.errors import RecipeError

from .pretrained import FOLDERS, copied


def test_the_folders_of_the_tests_are_the_default(tmp_path: Path) -> None:
    assert {folder.name for folder in folders([])} == set(FOLDERS)
    with pytest.raises(RecipeError, match="expected a folder with reference"):
        folders([FIXTURES / "gpt2", tmp_path])


def test_other_logits_are_seen(tmp_path: Path) -> None:
    folder = copied("bert-classes", tmp_path)
    stored = dict(np.load(folder / REFERENCE))
    stored["logits"] = stored["logits"] + np.float32(2e-4)
    np.savez(folder / REFERENCE, **stored)
    kept, moved = logits_table([FIXTURES / "bert-classes", folder]).rows
    assert kept["within"]
    assert not moved["within"]
    assert moved["difference"] == pytest.approx(2e-4, rel=0.1)
    assert kept["task"] == "classification"
