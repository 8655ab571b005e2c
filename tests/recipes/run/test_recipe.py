"""Every recipe's module `task` implements the interface `Recipe`."""

import inspect

import numpy as np

from recipes.config import RunConfig
from recipes.recipe import Recipe, loss_inputs, recipe_of
from recipes.registry import RECIPES


def test_windows_are_ids_and_targets_one_further():
    ids, targets = loss_inputs(np.arange(8).reshape(2, 4))
    np.testing.assert_array_equal(ids, [[0, 1, 2], [4, 5, 6]])
    np.testing.assert_array_equal(targets, [[1, 2, 3], [5, 6, 7]])


def test_every_recipe_of_runs_gives_what_training_asks():
    for name in (name for name, kind in RECIPES.items() if issubclass(kind, RunConfig)):
        recipe = recipe_of(RunConfig(recipe=name, name="x"))
        for function in ("build", "abstract_batch", "load_data", "scores", "closing"):
            _, *wanted = inspect.signature(getattr(Recipe, function)).parameters  # without self
            assert list(inspect.signature(getattr(recipe, function)).parameters) == wanted
