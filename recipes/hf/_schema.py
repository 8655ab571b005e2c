"""What a config.json holds, checked against a schema."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import RecipeError, clipped
from ._folder import CONFIG


def validated(schema: type, values: dict[str, Any], path: Path, key: str = "") -> Any:
    """The schema's object; `key` names the section of config.json that the values are of."""
    try:
        return schema(**values)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, (*([key] if key else []), *problem["loc"]))) or "the shape"
        expected = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            expected = "no such key"
        got = "" if problem["type"] == "value_error" else f"; got {clipped(problem['input'])}"
        raise RecipeError(
            f"{path / CONFIG}: {where}: expected {expected}{got}; no other variant is supported"
        ) from error
