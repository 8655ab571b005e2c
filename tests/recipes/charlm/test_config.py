from __future__ import annotations

from pathlib import Path

import pytest

from recipes.charlm.config import CharlmConfig
from recipes.charlm.grid import make_points
from recipes.registry import RECIPES, load_any_config
from recipes.errors import RecipeError

from .characters import make, write

CONFIGS = Path(__file__).parents[2] / "configs" / "charlm"
WRONG = [
    ("model.kind=mlp", r"model\.kind .*: expected 'conv', 'rnn' or 'attention'; got 'mlp'"),
    ("model.cell=gruu", r"model\.cell .*; did you mean gru\?"),
    ("model.precision=fp8", r"model: precision fp8 needs parametrization unit: .*; set"),
    ("model.cell=rhn", r"model: cell rhn needs parametrization unit: .*; use gru or lstm"),
    ("model.heads=3", r"model: heads must divide width; got 3 and 8"),
    ("sweep.factor=1.0", r"sweep\.factor .*greater than 1; got 1\.0"),
    ("sweep.rates=2", r"sweep\.rates .*got 2"),
    ("sweep.seeds=[]", r"sweep\.seeds .*at least 1"),
]


@pytest.mark.parametrize(("override", "message"), WRONG)
def test_what_is_wrong_is_named(override, message, tmp_path) -> None:
    path = write(tmp_path, model={"parametrization": "regular", "kind": "rnn"})
    with pytest.raises(RecipeError, match=message):
        load_any_config(path, [override])


@pytest.mark.parametrize(("name", "points"), [("small", 180), ("full", 360)])
def test_the_studies_are_the_paper_s_grid(name, points) -> None:
    config = load_any_config(CONFIGS / f"{name}.yaml")
    assert isinstance(config, CharlmConfig)
    assert len(make_points(config)) == points
    assert RECIPES["charlm"] is CharlmConfig


def test_branches_of_attention_have_a_tau_of_their_own(tmp_path) -> None:
    shape = {"layers": 2, "tau": 0.5, "attention_ratio": 0.4}
    attention = make(tmp_path, model={**shape, "kind": "attention"}).model
    assert attention.taus == [0.2, 0.5, 0.2, 0.5]
    assert make(tmp_path, model={**shape, "kind": "conv"}).model.taus == [0.5] * 4
    assert make(tmp_path, model={**shape, "residual": "running_mean"}).model.taus == pytest.approx(
        [0.4, 2**-0.5, 0.4 * 3**-0.5, 0.5]
    )
