"""Reads YAML and `key=value` overrides into a config, or says in one message what is wrong.

The key `recipe` of the file says whose config it is: each recipe has a model of its own.
"""

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from .bert.config import BertConfig
from .charlm.config import CharlmConfig
from .config import (
    RunConfig,
    describe_problems,
    entry_of,
    expand_preset,
    section_of,
    unknown_key,
    valid_keys,
)
from .errors import RecipeError, read_text
from .finetune.config import FinetuneConfig
from .gpt.config import GPTConfig
from .images.config import ImagesConfig
from .run.folder import CONFIG, is_run

RECIPES: dict[str, type[RunConfig]] = {
    "gpt": GPTConfig,
    "bert": BertConfig,
    "finetune": FinetuneConfig,
    "images": ImagesConfig,
    "charlm": CharlmConfig,
}
"""The config of each recipe, by its name; a file that names none is a GPT's."""

CONFIGS = Path(__file__).parents[1] / "configs"
"""The configs that come with the recipes."""

Kind = TypeVar("Kind", bound=RunConfig)


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, kept: bool = False
) -> RunConfig:
    """Reads a config file of any recipe, or one of `CONFIGS`, and applies dotted overrides.

    The value of an override such as `train.steps=100` is read as YAML. A mapping takes the place of
    the file's, but for sections, of which other keys stay; {} empties one. `kept` reads the config
    of a trained run, which says what `init` stood for. Every key that is wrong is named in one
    RecipeError.
    """
    file = _read(_file(Path(path)))
    schema = _schema_of(file.get("recipe", "gpt"), path)
    if kept or Path(path).name == CONFIG:  # that of a run, perhaps of an earlier version
        file = OmegaConf.create(schema.upgraded(OmegaConf.to_container(file)))
    if "precision" in file:  # the name of a preset, some of whose keys overrides may change
        file.precision = expand_preset(file.precision)
    for word in overrides:
        _override(file, word, schema)
    tree: Any = OmegaConf.to_container(file)
    try:
        config = schema.model_validate(tree if kept else schema.filled(tree))
    except ValidationError as error:
        raise wrong_values(error, schema, f"{path}: ") from error
    return config.settled


def wrong_values(error: ValidationError, schema: type[RunConfig], where: str = "") -> RecipeError:
    """Make an error of pydantic's, one line for each wrong key."""
    problems = describe_problems(error.errors(), schema)
    return RecipeError("\n".join(f"{where}{problem}" for problem in problems))


def load_kind(kind: type[Kind], path: str | Path, overrides: Sequence[str] = ()) -> Kind:
    """Reads the config of one recipe; see `load_config`."""
    config = load_config(path, overrides)
    if not isinstance(config, kind):
        wanted = next(name for name, schema in RECIPES.items() if schema is kind)
        raise RecipeError(
            f"{path}: expected a config of recipe {wanted}; got recipe {config.recipe}; name "
            "another file"
        )
    return config


def _schema_of(name: Any, path: str | Path) -> type[RunConfig]:
    if isinstance(name, str) and name in RECIPES:
        return RECIPES[name]
    close = difflib.get_close_matches(str(name), RECIPES, n=1, cutoff=0.4)
    todo = f"did you mean {close[0]}?" if close else "correct the value"
    raise RecipeError(f"{path}: recipe: expected one of {', '.join(RECIPES)}; got {name!r}; {todo}")


def _file(path: Path) -> Path:
    """The file of that path; where there is none, that of `CONFIGS`."""
    own = CONFIGS.joinpath(*path.parts[path.parts[:1] == ("configs",) :])
    return own if not path.exists() and own.exists() else path


def _read(path: Path) -> DictConfig:
    if not path.exists():
        raise RecipeError(
            f"config file {path} does not exist; give the path of a YAML file{_similar_file(path)}"
        )
    if path.is_dir():
        todo = f"give {path / CONFIG}" if is_run(path) else "give the path of one"
        raise RecipeError(f"config file: expected a YAML file; got {path}, a folder; {todo}")
    text = read_text(path, "config file", "give a readable YAML file")
    return _mapping(lambda: OmegaConf.create(text), f"config file {path}")


def _override(file: DictConfig, word: str, schema: type[RunConfig]) -> None:
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise RecipeError(
            f"override {word!r}: expected key=value, for example train.steps=100; add the '='"
        )
    mapping, entry = entry_of(key, schema)
    if (field := dict(valid_keys(schema)).get(mapping)) is None:
        raise RecipeError(f"override {word!r}: {unknown_key(key, schema)}")
    found = _mapping(lambda: OmegaConf.from_dotlist([f"value={value}"]), f"override {word!r}")
    try:
        tree: Any = OmegaConf.to_container(found, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise RecipeError(
            f"override {word!r}: expected a value; got a reference to none; write the value itself"
        ) from error
    new = tree["value"]
    if entry:
        new = {**(OmegaConf.select(file, mapping) or {}), entry: new}
    # Of a section other keys stay, unless it is emptied; any other mapping takes the file's place.
    merge = section_of(field) is not None and isinstance(new, dict) and bool(new)
    if mapping == "precision":
        new = expand_preset(new)  # the name of a preset takes the place of the section
    OmegaConf.update(file, mapping, new, merge=merge)


def _mapping(parse: Callable[[], Any], where: str) -> DictConfig:
    try:
        parsed = parse()
    except (YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        is_alias = "expected alphabetic or numeric" in problem  # which a star begins
        todo = "put quotes around what begins with *" if is_alias else "correct the line"
        raise RecipeError(f"{where}{line}: not valid YAML: {problem}; {todo}") from error
    if not isinstance(parsed, DictConfig) or not parsed:
        got = "nothing" if not parsed else "a list"
        raise RecipeError(
            f"{where}: expected a mapping of keys to values; got {got}; start from configs/"
        )
    return parsed


def _similar_file(path: Path) -> str:
    for folder in (path.parent, _file(path.parent)):
        names = [p.name for p in folder.glob("*.yaml")] if folder.is_dir() else []
        if close := difflib.get_close_matches(path.name, names, n=1, cutoff=0.5):
            return f"; did you mean {path.parent / close[0]}?"
    return ""
