"""Reads YAML and `key=value` overrides into a config, or says in one message what is wrong.

The key `recipe` of the file says whose config it is: each recipe has a model of its own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from .bert.config import BertConfig
from .charlm.config import CharlmConfig
from .config import RunConfig, describe_problem, parent_of, unknown_key, valid_keys
from .errors import RecipeError
from .finetune.config import FinetuneConfig
from .gpt.config import GPTConfig
from .images.config import ImagesConfig

RECIPES: dict[str, type[RunConfig]] = {
    "gpt": GPTConfig,
    "bert": BertConfig,
    "finetune": FinetuneConfig,
    "images": ImagesConfig,
    "charlm": CharlmConfig,
}
"""The config of each recipe, by its name; a file that names none is a GPT's."""

Kind = TypeVar("Kind", bound=RunConfig)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-3` as text and lets a key be given twice; this loader does neither."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: dict[Any, yaml.Mark] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    "", seen[key], f"the key {key!r} is given twice", key_node.start_mark
                )
            seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a config file of any recipe and applies dotted overrides.

    Args:
      path: A YAML file; its key `recipe` chooses from `RECIPES`.
      overrides: Strings such as `train.steps=100`; the value is read as YAML.

    Returns:
      The validated, frozen config.

    Raises:
      RecipeError: The file cannot be read, is not a YAML mapping, or has a key or value that the
        recipe's config does not allow. The message names every such key. Or `init` is no folder of
        GPT-2.
    """
    tree = _read_yaml(Path(path))
    schema = _schema_of(tree, path)
    for override in overrides:
        _apply_override(tree, override, schema)
    try:
        config = schema.model_validate(schema.filled(tree))
    except ValidationError as error:
        problems = [describe_problem(problem, schema) for problem in error.errors()]
        raise RecipeError("\n".join(f"{path}: {problem}" for problem in problems)) from error
    return config.settled


def load_kind(kind: type[Kind], path: str | Path, overrides: Sequence[str] = ()) -> Kind:
    """Reads the config of one recipe; see `load_config`.

    Raises:
      RecipeError: As there, or the config is that of another recipe.
    """
    config = load_config(path, overrides)
    if not isinstance(config, kind):
        wanted = next(name for name, schema in RECIPES.items() if schema is kind)
        raise RecipeError(
            f"{path}: expected a config of recipe {wanted}; got recipe {config.recipe}; name a "
            f"config of recipe {wanted}"
        )
    return config


def _schema_of(tree: dict[str, Any], path: str | Path) -> type[RunConfig]:
    name = tree.get("recipe", "gpt")
    if not isinstance(name, str) or name not in RECIPES:
        close = difflib.get_close_matches(str(name), RECIPES, n=1, cutoff=0.4)
        todo = f"did you mean {close[0]}?" if close else "correct the value"
        raise RecipeError(
            f"{path}: recipe: expected one of {', '.join(RECIPES)}; got {name!r}; {todo}"
        )
    return RECIPES[name]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(
            f"config file {path} does not exist; give the path of a YAML file{_similar_file(path)}"
        ) from None
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"config file {path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error
    except OSError as error:
        raise RecipeError(
            f"config file {path} cannot be read: {error.strerror}; give a readable YAML file"
        ) from error
    tree = _parse(text, f"config file {path}")
    if not isinstance(tree, dict):
        raise RecipeError(
            f"config file {path}: expected a mapping of keys to values; "
            f"got {'nothing' if tree is None else type(tree).__name__}; start from configs/"
        )
    return tree


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: builds plain values only
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise RecipeError(f"{where}{line}: not valid YAML: {problem}; correct the line") from error


def _similar_file(path: Path) -> str:
    folder = path.parent
    names = [p.name for p in folder.glob("*.yaml")] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; did you mean {folder / close[0]}?" if close else ""


def _apply_override(tree: dict[str, Any], override: str, schema: type[RunConfig]) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(
            f"override {override!r}: expected key=value, for example train.steps=100; add the '='"
        )
    known = dict(valid_keys(schema))
    if key not in known:
        raise RecipeError(f"override {override!r}: {unknown_key(key, schema)}")
    value = _parse(text, f"override {override!r}")
    node, last = parent_of(tree, key)
    old = node.get(last)
    if isinstance(value, Mapping) and isinstance(old, dict):
        old.update(value)
    else:
        node[last] = value
