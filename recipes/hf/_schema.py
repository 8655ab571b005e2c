"""What a config.json holds, checked against a schema."""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ..errors import RecipeError, clipped
from ._folder import CONFIG

# Keys that change nothing here: what files are called, ids, drawing, training, and how it is run.
_INERT = {
    *("_name_or_path", "name_or_path", "_commit_hash", "architectures", "auto_map", "model_type"),
    *("transformers_version", "transformers.js_config", "unsloth_version", "unsloth_fixed"),
    *("sentence_transformers", "is_llama_config", "_sliding_window_pattern", "tokenizer_class"),
    *("model_max_length", "tokenizer_model_max_length", "max_sequence_length", "prefix"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
    *("cls_token_id", "mask_token_id", "decoder_start_token_id"),
    *("id2label", "label2id", "num_labels", "_num_labels", "problem_type", "finetuning_task"),
    *("initializer_range", "attention_dropout", "gradient_checkpointing", "neftune_noise_alpha"),
    *("torch_dtype", "dtype", "use_cache", "cache_implementation", "pretraining_tp", "torchscript"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
    *("_attn_implementation_internal", "chunk_size_feed_forward", "keys_to_ignore_at_inference"),
    *("return_dict", "use_return_dict", "output_attentions", "output_hidden_states", "output_past"),
    # Drawing, which `transformers` once kept here.
    *("task_specific_params", "max_length", "min_length", "do_sample", "early_stopping"),
    *("num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p"),
    *("typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores"),
    *("return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
    *("begin_suppress_tokens",),
}
# These switch nothing on, nor does 0.
_OFF = (None, False, "", [], {})


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
    own = {field.alias or name for name, field in schema.model_fields.items()}
    known = _INERT | inert | own
    for key, value in config.items():
        if key not in known and value not in _OFF:
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
