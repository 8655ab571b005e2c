"""Reads YAML and `key=value` overrides into a config, or says in one message what is wrong.

The key `recipe` of the file says whose config it is: each recipe has a model of its own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from .bert.config import BertConfig
from .charlm.config import CharlmConfig
from .config import Config, RunConfig
from .errors import RecipeError
from .finetune.config import FinetuneConfig, with_formats
from .mnist.config import MnistConfig

AnyConfig = RunConfig | MnistConfig | CharlmConfig
RECIPES: dict[str, type[AnyConfig]] = {
    "gpt": Config,
    "bert": BertConfig,
    "finetune": FinetuneConfig,
    "mnist": MnistConfig,
    "charlm": CharlmConfig,
}
"""The config of each recipe, by its name; a file that names none is a GPT's."""


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


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads the config of a GPT; see `load_any_config`.

    Raises:
      RecipeError: As there, or the config is that of another recipe.
    """
    config = load_any_config(path, overrides)
    if not isinstance(config, Config):
        raise RecipeError(
            f"{path}: expected a config of recipe gpt; got recipe {config.recipe}; name a config of"
            " a GPT"
        )
    return config


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads the config of a run that can be evaluated; see `load_any_config`.

    Raises:
      RecipeError: As there, or the config is that of a recipe that is only trained.
    """
    config = load_any_config(path, overrides)
    if not isinstance(config, RunConfig):
        raise RecipeError(
            f"{path}: expected a config of a recipe that can be evaluated; got recipe "
            f"{config.recipe}, which can be trained only; name another config"
        )
    return config


def load_any_config(path: str | Path, overrides: Sequence[str] = ()) -> AnyConfig:
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
    if schema is Config and isinstance(tree.get("init"), str):
        # These import JAX, which a wrong key need not wait for.
        from .data import TOKENIZER_FILE  # noqa: PLC0415
        from .pretrained import with_shape  # noqa: PLC0415

        tree["model"] = with_shape(tree["init"], tree.get("model"))
        data = tree.setdefault("data", {})
        if isinstance(data, dict):
            own = {"kind": "file", "path": str(Path(tree["init"]) / TOKENIZER_FILE)}
            data.setdefault("tokenizer", own)
    try:
        config = schema.model_validate(tree)
    except ValidationError as error:
        problems = [_describe(problem, schema) for problem in error.errors()]
        raise RecipeError("\n".join(f"{path}: {problem}" for problem in problems)) from error
    return with_formats(config) if isinstance(config, FinetuneConfig) else config


def dump_config(config: AnyConfig) -> str:
    """The resolved config as YAML, every key written out.

    Example:
      >>> from recipes.config import Config
      >>> dump_config(Config(name="demo")).splitlines()[:2]
      ['recipe: gpt', 'name: demo']
    """
    return yaml.safe_dump(config.model_dump(), sort_keys=False)


def valid_keys(
    model: type[BaseModel] = Config, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key with its field, sections included."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        section = _section(field)
        if section is not None:
            yield from valid_keys(section, f"{prefix}{name}.")


def _schema_of(tree: dict[str, Any], path: str | Path) -> type[AnyConfig]:
    name = tree.get("recipe", "gpt")
    if not isinstance(name, str) or name not in RECIPES:
        close = difflib.get_close_matches(str(name), RECIPES, n=1, cutoff=0.4)
        todo = f"did you mean {close[0]}?" if close else "correct the value"
        raise RecipeError(
            f"{path}: recipe: expected one of {', '.join(RECIPES)}; got {name!r}; {todo}"
        )
    return RECIPES[name]


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a section, also of one that may be null."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


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


def _apply_override(tree: dict[str, Any], override: str, schema: type[AnyConfig]) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(
            f"override {override!r}: expected key=value, for example train.steps=100; add the '='"
        )
    known = dict(valid_keys(schema))
    if key not in known:
        raise RecipeError(f"override {override!r}: {unknown_key(key, schema)}")
    value = _parse(text, f"override {override!r}")
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        child = node.get(parent)
        if not isinstance(child, dict):
            child = node[parent] = {}
        node = child
    old = node.get(last)
    if isinstance(value, Mapping) and isinstance(old, dict):
        old.update(value)
    else:
        node[last] = value


def _describe(problem: Mapping[str, Any], schema: type[AnyConfig]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    got, message = problem["input"], problem["msg"]
    if problem["type"] == "extra_forbidden":
        return unknown_key(key, schema)
    if problem["type"] == "missing":
        return f"{key}: expected a value; got none; set it: {_meaning(key, schema)}"
    if problem["type"] == "value_error":
        return f"{key}: {problem['ctx']['error']}" if key else str(problem["ctx"]["error"])
    if problem["type"] == "string_pattern_mismatch":
        message = "Input should be a name without spaces or slashes"
    if problem["type"] in ("model_type", "model_attributes_type"):
        message = "Input should be a mapping of keys to values"
    expected = message.removeprefix("Input should be ")
    near = ""
    if problem["type"] == "literal_error":
        choices = [str(choice) for choice in _choices(key, schema)]
        close = difflib.get_close_matches(str(got), choices, n=1, cutoff=0.4)
        near = f"; did you mean {close[0]}?" if close else ""
    todo = near or "; correct the value"
    return f"{key} ({_meaning(key, schema)}): expected {expected}; got {got!r}{todo}"


def _meaning(key: str, schema: type[AnyConfig]) -> str:
    field = dict(valid_keys(schema)).get(key)
    return (field.description if field else None) or f"described in {schema.__module__}"


def _choices(key: str, schema: type[AnyConfig]) -> tuple[Any, ...]:
    field = dict(valid_keys(schema)).get(key)
    return get_args(field.annotation) if field else ()


def unknown_key(key: str, schema: type[AnyConfig]) -> str:
    """What to say of a key that a config does not have, with the nearest one that it has."""
    keys = [name for name, field in valid_keys(schema) if not _section(field)]
    sections = [name for name, field in valid_keys(schema) if _section(field)]
    section, _, last = key.rpartition(".")
    tails = {name.rpartition(".")[2]: name for name in keys}
    # A key in the wrong section is nearer to the same last name than to any full path.
    close = [tails[last]] if last in tails else difflib.get_close_matches(key, sections, 1, 0.8)
    close = [name for name in close if not key.startswith(f"{name}.")]
    close = close or difflib.get_close_matches(key, keys, 1, 0.75)
    if not close:
        close = [tails[tail] for tail in difflib.get_close_matches(last, tails, 1, 0.6)]
    if close:
        hint = f"did you mean {close[0]}?"
    elif section in sections:
        siblings = [name.rpartition(".") for name, _ in valid_keys(schema)]
        listed = ", ".join(tail for head, _, tail in siblings if head == section)
        hint = f"{section} has the keys {listed}"
    else:
        hint = f"the top-level keys are {', '.join(schema.model_fields)}"
    return f"{key} is not a key of the config; {hint}"
