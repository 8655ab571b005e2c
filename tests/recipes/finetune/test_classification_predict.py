"""The best label of each row, and the file of a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from recipes.errors import RecipeError
from recipes.finetune.classification_data import Row
from recipes.finetune.classification_predict import predict_labels, write_labels

LOGITS = np.array([[0.0, 1000.0], [np.log(3), 0.0], [2.0, 2.0]], np.float32)


def test_the_best_label() -> None:
    assert predict_labels(LOGITS).tolist() == [1, 0, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_not_finite(value: float) -> None:
    with pytest.raises(RecipeError, match="not finite; lower optimizer") as caught:
        predict_labels(np.array([[0.0, value]]))
    assert caught.value.exit_code == 1


def test_the_file(tmp_path: Path) -> None:
    rows = [Row("s", None, 0, line) for line in (2, 3, 5)]
    write_labels(tmp_path, rows, LOGITS, ("no", "yés"))
    (path,) = tmp_path.iterdir()
    assert path.name == "predictions.json"
    first, second, third = json.loads(path.read_text(encoding="utf-8"))
    assert first == {"line": 2, "label": "yés", "probability": 1.0}
    # log 3 is rounded to float32, by at most 2**-24 of it.
    assert second == {"line": 3, "label": "no", "probability": pytest.approx(3 / 4, rel=2**-24)}
    assert third == {"line": 5, "label": "no", "probability": 0.5}
