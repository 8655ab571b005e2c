import pytest

from recipes.bench._numbers import numbers
from recipes.errors import RecipeError


def test_numbers_are_sorted_and_each_once() -> None:
    assert numbers("--rates", "0.004, 0.002,0.004", float) == [0.002, 0.004]
    assert numbers("--depths", "8,4", int) == [4, 8]


@pytest.mark.parametrize("text", ["", "a", "0.1,", "0.1,-1", "0", "nan", "0.1,nan"])
def test_rates_are_numbers_above_0(text: str) -> None:
    with pytest.raises(RecipeError, match=r"--plain-rates: expected numbers above 0, .*give such"):
        numbers("--plain-rates", text, float)


@pytest.mark.parametrize("text", ["4,x", "4.5", "0", "-1"])
def test_counts_are_integers_above_0(text: str) -> None:
    with pytest.raises(RecipeError, match=r"--depths: expected integers above 0, .*as 4,8"):
        numbers("--depths", text, int)
