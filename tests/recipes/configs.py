"""The configs in `configs/`, and a test for tables of invalid overrides."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recipes.errors import RecipeError
from recipes.registry import load_config

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = {
    "finetune": ["init=nowhere", "data.train=a", "data.validation=b"],
    "images": ["data.folder=x"],
}
"""Overrides for what the configs of a recipe leave to users."""


def refuses_configs(table: Sequence[tuple[str | list[str], str]]) -> Any:
    """Make a test that each row's overrides are refused with a matching message."""

    @pytest.mark.parametrize(("overrides", "message"), table, ids=lambda value: str(value)[:40])
    def test(config_file: Path, overrides: str | list[str], message: str) -> None:
        words = [overrides] if isinstance(overrides, str) else overrides
        with pytest.raises(RecipeError, match=message) as caught:
            load_config(config_file, words)
        assert caught.value.exit_code == 2

    return test
