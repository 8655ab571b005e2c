"""The dotted keys of a config, and messages for wrong ones."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .run import MOVED, REMOVED, RunConfig


def valid_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every dotted key that a file may have, with its field; sections included."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        section = section_of(field)
        if section is not None and not field.json_schema_extra:  # filled in from `init`
            yield from valid_keys(section, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a section, also of one that may be null."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def entry_of(key: str, schema: type[RunConfig]) -> tuple[str, str]:
    """Split the dotted key of an entry, such as `sweep.grid.model.kind`, after its mapping."""
    for name, field in valid_keys(schema):
        kinds = (field.annotation, *get_args(field.annotation))
        if key.startswith(f"{name}.") and any(get_origin(kind) is dict for kind in kinds):
            return name, key.removeprefix(f"{name}.")
    return key, ""


def describe_problems(
    problems: Sequence[Mapping[str, Any]], schema: type[RunConfig]
) -> Iterator[str]:
    """Yield pydantic's errors, in one line for each key."""
    values = {name for name, field in valid_keys(schema) if not section_of(field)}
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for problem in problems:
        parts = [str(part) for part in problem["loc"] if part != "[key]"]
        key, parent = ".".join(parts), ".".join(parts[:-1])
        # Errors of each type of a union are located below its key.
        in_union = parent in values and isinstance(problem["loc"][-1], str)
        merged = in_union and not entry_of(key, schema)[1]
        groups.setdefault(parent if merged else key, []).append(problem)
    for key, group in groups.items():
        yield _describe(key, group, schema)


def _describe(key: str, group: Sequence[Mapping[str, Any]], schema: type[RunConfig]) -> str:
    kind = group[0]["type"]
    if kind == "extra_forbidden":
        return unknown_key(key, schema)
    if kind == "value_error":
        return f"{key}: {group[0]['ctx']['error']}".removeprefix(": ")
    listed = re.sub(r"(\.\d+)+$", "", key)  # without positions in lists
    field = dict(valid_keys(schema)).get(entry_of(listed, schema)[0])
    meaning = " ".join(((field and field.description) or "").split()).rstrip(".")
    if kind == "missing":
        return f"{key}: expected a value; got none; set it ({meaning})"
    expected = " or ".join(problem["msg"].removeprefix("Input should be ") for problem in group)
    if kind == "model_type":
        expected = "a mapping of keys to values"
    if expected[0].islower() or expected[0] == "'":
        expected = f"expected {expected}"
    return f"{key} ({meaning}): {expected}; got {group[0]['input']!r}"


def unknown_key(key: str, schema: type[RunConfig]) -> str:
    """Describe an unknown key: its new name, its constant value, or the nearest key."""
    new = MOVED | REMOVED | schema.moved | schema.renamed
    if key in new:
        return f"{key} is no longer a key of the config; set {new[key]}"
    if key in schema.constants:
        return f"{key} is no longer a key of the config; it is always {schema.constants[key]}"
    fields = dict(valid_keys(schema))
    section, _, last = key.rpartition(".")
    inside = {
        name.rpartition(".")[2]: name for name in fields if name.rpartition(".")[0] == section
    }
    elsewhere = {name.rpartition(".")[2]: name for name, f in fields.items() if not section_of(f)}
    for names, cutoff in ((elsewhere, 1.0), (inside, 0.6), (elsewhere, 0.6)):
        if close := difflib.get_close_matches(last, names, 1, cutoff):
            return f"{key} is not a key of the config; did you mean {names[close[0]]}?"
    owner = section if section and inside else "the config"
    names = inside or schema.model_fields
    return f"{key} is not a key of the config; {owner} has the keys {', '.join(names)}"
