"""The dotted keys of a config, and what to say of one that is wrong."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .run import MOVED, REMOVED, RunConfig


def valid_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key that a file may have, with its field; sections included."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        section = section_of(field)
        if section is not None and not field.json_schema_extra:  # filled in from `init`
            yield from valid_keys(section, f"{prefix}{name}.")


def entry_of(key: str, schema: type[RunConfig]) -> tuple[str, str]:
    """The key of a mapping and the name in it that a dotted key names; of any other key, itself.

    Such as `sweep.grid` and `model.kind` of `sweep.grid.model.kind`.
    """
    for name, field in valid_keys(schema):
        kinds = (field.annotation, *get_args(field.annotation))
        if key.startswith(f"{name}.") and any(get_origin(kind) is dict for kind in kinds):
            return name, key.removeprefix(f"{name}.")
    return key, ""


# What other libraries call the formats.
_SHORT = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}


# What pydantic says of a value, in the words of a config.
_EXPECTED = {
    "bool_type": "true or false",
    "string_pattern_mismatch": "a name of ASCII letters, digits, dots, dashes, underscores",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "string_too_short": "at least {min_length} characters",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
}


def describe_problems(
    problems: Sequence[Mapping[str, Any]], schema: type[RunConfig]
) -> Iterator[str]:
    """Pydantic's errors, one line a key: what was expected, what came, and what to do."""
    keys = {name for name, field in valid_keys(schema) if not section_of(field)}
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for problem in problems:
        parts = [str(part) for part in problem["loc"] if part != "[key]"]
        whole = ".".join(parts)
        # Of a key that takes several types, each has its say under a name of its own.
        key = ".".join(parts[:-1])
        is_one_of_several = key in keys and isinstance(problem["loc"][-1], str)
        named = entry_of(whole, schema)[1] or not is_one_of_several
        groups.setdefault(whole if named else key, []).append(problem)
    for key, group in groups.items():
        # A list whose entries are wrong is not also too short.
        entries = any(other.startswith(f"{key}.") for other in groups)
        if not (entries and all(problem["type"] == "too_short" for problem in group)):
            yield _describe(key, group, schema)


def _describe(key: str, group: Sequence[Mapping[str, Any]], schema: type[RunConfig]) -> str:
    problem, got = group[0], group[0]["input"]
    if problem["type"] == "extra_forbidden":
        return unknown_key(key, schema)
    if problem["type"] == "missing":
        return f"{key}: expected a value; got none; set it: {_meaning(key, schema)}"
    if problem["type"] == "value_error":
        return f"{key}: {problem['ctx']['error']}" if key else str(problem["ctx"]["error"])
    expected = " or ".join(
        _EXPECTED[one["type"]].format(**one.get("ctx", {}))
        if one["type"] in _EXPECTED
        else one["msg"].removeprefix("Input should be ")
        for one in group
    ).replace("true or false or", "true, false or")
    named = [one["ctx"]["expected"] for one in group if one["type"] == "literal_error"]
    choices = re.findall("'([^']*)'", " ".join(named))
    close = [name for name in (_SHORT.get(str(got)),) if name in choices]
    close = close or difflib.get_close_matches(str(got), choices, n=1, cutoff=0.4)
    todo = f"did you mean {close[0]}?" if close else "correct the value"
    return f"{key} ({_meaning(key, schema)}): expected {expected}; got {got!r}; {todo}"


def unknown_key(key: str, schema: type[RunConfig]) -> str:
    """Describe an unknown key: its new name, or the nearest key."""
    if (today := (MOVED | REMOVED | schema.renamed).get(key)) is not None:
        return f"{key} is no longer a key of the config; set {today}"
    keys = [name for name, field in valid_keys(schema) if not section_of(field)]
    sections = [name for name, field in valid_keys(schema) if section_of(field)]
    section, _, last = key.rpartition(".")
    tails = {name.rpartition(".")[2]: name for name in keys}
    # A key in the wrong section is nearer to the same last name than to any full path.
    close = [tails[last]] if last in tails else difflib.get_close_matches(key, sections, 1, 0.8)
    close = [name for name in close if not key.startswith(f"{name}.")]
    # What two keys have in common shall not be their section alone.
    near = difflib.get_close_matches(last, tails, len(tails), 0.6)
    whole = difflib.get_close_matches(key, keys, 3, 0.75)
    close = close or [name for name in whole if name.rpartition(".")[2] in near]
    close = close or [tails[tail] for tail in near]
    if close:
        hint = f"did you mean {close[0]}?"
    elif section in sections:
        siblings = [name.rpartition(".") for name, _ in valid_keys(schema)]
        listed = ", ".join(tail for head, _, tail in siblings if head == section)
        hint = f"{section} has the keys {listed}"
    else:
        hint = f"the top-level keys are {', '.join(schema.model_fields)}"
    return f"{key} is not a key of the config; {hint}"


def _meaning(key: str, schema: type[RunConfig]) -> str:
    listed = re.sub(r"(\.\d+)+$", "", key)  # of an entry of a list
    field = dict(valid_keys(schema)).get(entry_of(listed, schema)[0])
    return (field.description if field else None) or f"described in {schema.__module__}"


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a section, also of one that may be null."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
