"""Read a YAML file and `key=value` overrides into a recipe's config, or report what is wrong."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from .bert.config import BertConfig
from .charlm.config import CharlmConfig
from .config import RunConfig, run as keys
from .errors import RecipeError, read_text
from .finetune.config import FinetuneConfig
from .gpt.config import GPTConfig
from .images.config import ImagesConfig
from .run.folder import CONFIG, is_run, similar

RECIPES: dict[str, type[RunConfig]] = {
    "gpt": GPTConfig,
    "bert": BertConfig,
    "finetune": FinetuneConfig,
    "images": ImagesConfig,
    "charlm": CharlmConfig,
}
"""Config classes by recipe; a file without the key `recipe` is of recipe gpt."""

STORED = {"name", "seed", "data", "optimizer", "train"}
"""Some keys of every config that a run has stored, also of earlier versions."""

CONFIGS = Path(__file__).parents[1] / "configs"
"""Folder of the configs that come with the recipes."""

Kind = TypeVar("Kind", bound=RunConfig)


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, kept: bool = False
) -> RunConfig:
    """Read a config file of any recipe, or one of `CONFIGS`, and apply dotted overrides.

    The value of an override such as `train.steps=100` is read as YAML. Set `kept` for the stored
    config of a run, which already has the keys that follow from `init`.
    """
    file = _read(_file(Path(path)))
    name = file.get("recipe", "gpt")
    if not isinstance(name, str) or (schema := RECIPES.get(name)) is None:
        raise RecipeError(f"{path}: recipe: expected one of {', '.join(RECIPES)}; got {name!r}")
    if kept or (Path(path).name == CONFIG and file.keys() >= STORED):
        file = OmegaConf.create(schema.upgraded(OmegaConf.to_container(file)))
    if "precision" in file:  # expand a preset's name, so that overrides can change single keys
        file.precision = keys.expand_preset(file.precision)
    # A preset's name replaces the whole section: keys that change it come after, in any order.
    for word in sorted(overrides, key=lambda word: not word.strip().startswith("precision=")):
        _override(file, word, schema)
    tree: Any = OmegaConf.to_container(file)
    try:
        config = schema.model_validate(tree if kept else schema.filled(tree))
    except ValidationError as error:
        problems = keys.describe_problems(error.errors(), schema)
        raise RecipeError("\n".join(f"{path}: {problem}" for problem in problems)) from error
    return config.settled


def load_kind(kind: type[Kind], path: str | Path, overrides: Sequence[str] = ()) -> Kind:
    """Read a config of a known class; see `load_config`."""
    config = load_config(path, overrides)
    assert isinstance(config, kind), f"{path} is of recipe {config.recipe}"
    return config


def _file(path: Path) -> Path:
    own = CONFIGS.joinpath(*path.parts[path.parts[:1] == ("configs",) :])
    return own if not path.exists() and own.exists() else path


def _read(path: Path) -> DictConfig:
    if not path.exists():
        todo = "give a YAML file, or a folder with a model" + similar(path, _file(path.parent))
        raise RecipeError(f"config file {path} does not exist; {todo}")
    if path.is_dir():
        todo = f"give {path / CONFIG}" if is_run(path) else "give the path of one"
        raise RecipeError(f"config file: expected a YAML file; got {path}, a folder; {todo}")
    text = read_text(path, "config file", "give a readable YAML file")
    with _parsing(f"config file {path}"):
        file = OmegaConf.create(text)
    if not isinstance(file, DictConfig) or not file:
        what = f"config file {path}: expected a mapping of keys to values"
        raise RecipeError(f"{what}; got {text[:40]!r}; start from a file in configs/")
    return file


def _override(file: DictConfig, word: str, schema: type[RunConfig]) -> None:
    key, equals, value = word.strip().partition("=")
    if not equals or not key:
        raise RecipeError(f"override {word!r}: expected key=value, such as train.steps=100")
    mapping, entry = keys.entry_of(key, schema)
    if (field := dict(keys.valid_keys(schema)).get(mapping)) is None:
        raise RecipeError(f"override {word!r}: {keys.unknown_key(key, schema)}")
    todo = "put the whole override in quotes, as in 'mesh={data: 4, fsdp: 2}'"
    with _parsing(f"override {word!r}", todo):
        found = OmegaConf.from_dotlist([f"value={value}"])
        tree: Any = OmegaConf.to_container(found, resolve=True, throw_on_missing=True)
    new = tree["value"]
    if entry:
        new = {**(OmegaConf.select(file, mapping) or {}), entry: new}
    # Merge keys into a section, unless the override is {}; replace any other mapping.
    merge = keys.section_of(field) is not None and isinstance(new, dict) and bool(new)
    if mapping == "precision":
        new = keys.expand_preset(new)
    OmegaConf.update(file, mapping, new, merge=merge)


@contextlib.contextmanager
def _parsing(where: str, todo: str = "correct it, or quote the value") -> Iterator[None]:
    try:
        yield
    except (YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise RecipeError(f"{where}{line}: not valid YAML: {problem}; {todo}") from error
