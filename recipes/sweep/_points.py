"""The points of a sweep: every combination of the values that its grid lists."""

import itertools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from pydantic import ValidationError

from ..config import RunConfig, describe_problems, unknown_key, valid_keys
from ..errors import RecipeError
from ..run.folder import flatten

RATE = "optimizer.learning_rate"
_OWN = ("recipe", "name", "seed", "sweep", "train.runs_dir")
"""Keys that no point may set: the sweep sets them itself, or they change no result."""


class Point(NamedTuple):
    """One combination of values, what follows from it under `sweep.when`, and the run it makes."""

    values: dict[str, Any]
    further: dict[str, Any]
    config: RunConfig

    @property
    def settings(self) -> dict[str, Any]:
        """All that sets it apart from other points, but for where its search starts."""
        both = self.values | self.further
        return {key: value for key, value in both.items() if key != RATE}

    def __str__(self) -> str:
        return in_words(self.values)


def key_of(settings: Mapping[str, Any]) -> str:
    """Settings as text, equal for equal ones."""
    return json.dumps(dict(settings), sort_keys=True)


def in_words(values: Mapping[str, Any]) -> str:
    """Values in a few words, such as `kind=rnn optimizer=sgd`."""
    names = {key: key.removesuffix(".name").rpartition(".")[2] for key in values}
    return " ".join(f"{names[key]}={value}" for key, value in values.items()) or "base"


def make_points(config: RunConfig) -> list[Point]:
    """Every point of a config's grid, without those that `sweep.when` leaves out."""
    if config.mesh or config.precision.monitor is not None:
        raise RecipeError(
            "sweep: many runs share one device and none is looked at on the way; got mesh or "
            "monitor; set both null"
        )
    grid = config.sweep.grid
    for key, values in grid.items():
        _check_key("sweep.grid", key, config, (*_OWN, RATE))
        if not values or len({repr(value) for value in values}) < len(values):
            raise RecipeError(
                f"sweep.grid: {key}: expected at least one value, none of them twice; got "
                f"{values}; list what to try"
            )
    for words, settings in config.sweep.when.items():
        for key in _conditions(words):
            _check_key("sweep.when", key, config, ())
        for key in settings or {}:
            _check_key("sweep.when", key, config, (*_OWN, *grid))
    combinations = (dict(zip(grid, v, strict=True)) for v in itertools.product(*grid.values()))
    points = [point for values in combinations if (point := _make_point(config, values))]
    if not points:
        raise RecipeError("sweep.grid: no point is left: sweep.when has null for all; add a value")
    return points


def _check_key(where: str, key: str, config: RunConfig, taken: tuple[str, ...]) -> None:
    if key not in dict(valid_keys(type(config))):
        raise RecipeError(f"{where}: {unknown_key(key, type(config))}")
    if any(key == own or key.startswith(f"{own}.") for own in taken):
        raise RecipeError(
            f"{where}: {key} cannot be set here; the sweep chooses learning rates and seeds itself "
            f"(sweep.seeds; a search starts at {RATE}), and each key has one place; remove it"
        )


def _conditions(words: str) -> dict[str, Any]:
    """The values that the words of `sweep.when` ask for, by key."""
    pairs = [word.partition("=") for word in words.split()]
    # Read as those of the grid are: YAML alone takes 1e-4 for a word.
    return {key: OmegaConf.from_dotlist([f"value={value}"])["value"] for key, _, value in pairs}


def _make_point(config: RunConfig, values: dict[str, Any]) -> Point | None:
    known = flatten(config.model_dump()) | values | flatten(values)
    further: dict[str, Any] = {}
    for words, settings in config.sweep.when.items():
        if all(known.get(key) == value for key, value in _conditions(words).items()):
            if settings is None:
                return None
            further |= settings
    # Only what was set: defaults may follow from what the point changes.
    tree = OmegaConf.create(config.model_dump(exclude_unset=True))
    for key, value in (values | further).items():
        OmegaConf.update(tree, key, value, merge=False)
    try:
        run = type(config).model_validate(OmegaConf.to_container(tree))
        return Point(values, further, run.settled)
    except ValidationError as error:
        problem = next(describe_problems(error.errors(), type(config)))
        raise RecipeError(
            f"sweep.grid: the point {in_words(values)} is no run: {problem}; change the grid, or "
            "add to sweep.when"
        ) from error
