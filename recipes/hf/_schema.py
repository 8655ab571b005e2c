"""What a config.json holds, checked against a schema."""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ..errors import RecipeError, clipped
from ._folder import CONFIG

# Keys that change nothing here: what files are called, ids, drawing, training, and how it is run.
_INERT = {
    *("_name_or_path", "architectures", "model_type", "transformers_version", "tokenizer_class"),
    *("torch_dtype", "dtype", "use_cache", "cache_implementation", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
    *("initializer_range", "attention_dropout", "id2label", "label2id", "task_specific_params"),
    *("max_length", "do_sample", "temperature", "top_k", "top_p", "_attn_implementation"),
    *("return_dict", "_sliding_window_pattern", "_attn_implementation_autoset"),
}


def known_only(
    config: Mapping[str, Any],
    schema: type[BaseModel],
    path: Path,
    inert: Set[str] = frozenset(),
    *,
    file: str = CONFIG,
) -> None:
    """Raises where a config.json has a key that is not known, and may change what is computed.

    `file` is the name of another such file.
    """
    known = _INERT | inert | schema.model_fields.keys()
    for key, value in config.items():
        # Null and false switch nothing on.
        if key not in known and value not in (None, False):
            raise RecipeError(
                f"{path / file}: {key}: expected no key that is not known here; got "
                f"{clipped(value)}, which may change what the model computes; if it does not, "
                "remove it"
            )


def validated(
    schema: type, values: dict[str, Any], path: Path, key: str = "", *, file: str = CONFIG
) -> Any:
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
            f"{path / file}: {where}: expected {expected}{got}; no other variant is supported"
        ) from error
