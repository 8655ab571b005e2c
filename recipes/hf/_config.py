"""Supported models and tasks, and validation of config.json."""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from ..errors import RecipeError, clipped
from ._folder import CONFIG, read_config

Task = Literal["lm", "masked_lm", "question_answering", "classification"]
Architectures = dict[Task | None, tuple[str, ...]]


def _encoder(name: str, *pretraining: str) -> Architectures:
    return {
        "masked_lm": (f"{name}ForMaskedLM", *pretraining),
        "question_answering": (f"{name}ForQuestionAnswering",),
        "classification": (f"{name}ForSequenceClassification",),
        None: (f"{name}Model",),
    }


ARCHITECTURES: dict[str, Architectures] = {
    "gpt2": {"lm": ("GPT2LMHeadModel", "GPT2Model")},
    "llama": {"lm": ("LlamaForCausalLM", "LlamaModel")},
    "mistral": {"lm": ("MistralForCausalLM", "MistralModel")},
    "qwen2": {"lm": ("Qwen2ForCausalLM", "Qwen2Model")},
    "qwen3": {"lm": ("Qwen3ForCausalLM", "Qwen3Model")},
    "gemma2": {"lm": ("Gemma2ForCausalLM", "Gemma2Model")},
    "gemma3_text": {"lm": ("Gemma3ForCausalLM", "Gemma3TextModel")},
    "bert": _encoder("Bert", "BertForPreTraining"),
    "roberta": _encoder("Roberta"),
    "modernbert": _encoder("ModernBert"),
}
"""Architectures of each model type by task (None: no head); the first one is written."""

# Keys that change nothing here: file names, ids, generation, dropout and other training, how a
# model is run, heads that are not read, and second names.
_INERT_KEYS = """
_name_or_path name_or_path _commit_hash architectures auto_map model_type dtype torch_dtype prefix
transformers_version transformers.js_config unsloth_version unsloth_fixed sentence_transformers
is_llama_config _sliding_window_pattern tokenizer_class model_max_length tokenizer_model_max_length
max_sequence_length bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id
mask_token_id decoder_start_token_id id2label label2id num_labels _num_labels problem_type
finetuning_task initializer_range attention_dropout gradient_checkpointing neftune_noise_alpha
use_cache cache_implementation pretraining_tp torchscript attn_implementation _attn_implementation
_attn_implementation_autoset _attn_implementation_internal chunk_size_feed_forward output_past
keys_to_ignore_at_inference return_dict use_return_dict output_attentions output_hidden_states
task_specific_params max_length min_length do_sample early_stopping num_beams num_beam_groups
diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty output_scores
no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
exponential_decay_length_penalty suppress_tokens begin_suppress_tokens n_ctx resid_pdrop embd_pdrop
attn_pdrop reorder_and_upcast_attn summary_type summary_use_proj summary_activation n_special
summary_first_dropout summary_proj_to_labels predict_special_tokens attention_probs_dropout_prob
classifier_dropout embedding_dropout directionality pooler_fc_size pooler_num_attention_heads
pooler_num_fc_layers pooler_size_per_head pooler_type initializer_cutoff_factor layer_norm_eps
deterministic_flash_attn reference_compile repad_logits_with_grad sparse_prediction
sparse_pred_ignore_index
"""
INERT = frozenset(_INERT_KEYS.split())
# Unknown keys with these values, or 0, switch nothing on.
_OFF = (None, False, "", [], {})


def model_type(
    config: Mapping[str, Any], path: Path, kinds: Mapping[str, Any] = ARCHITECTURES
) -> str:
    """Return the model type of a config.json; refuse other types, and code for the model.

    Such code may compute something else under the name of a standard class (MosaicBERT is a
    "BertForMaskedLM" with ALiBi). A tokenizer's code is not needed, as tokenizer.json is read.
    """
    kind: Any = config.get("model_type")
    if kind not in kinds:
        raise RecipeError(
            f"{path / CONFIG}: expected model_type {', '.join(kinds)}; got {kind!r}; give the "
            "folder of a supported model"
        )
    code = config.get("auto_map") or {}
    if not isinstance(code, dict) or code.keys() - {"AutoTokenizer"}:
        raise RecipeError(
            f"{path / CONFIG}: auto_map: expected no code for the model; got {clipped(code)}, "
            "which is not run and may compute something else; if it does not, remove auto_map"
        )
    return kind


def task_of(config: Mapping[str, Any], wanted: Task | None, path: Path) -> Task:
    """Return the requested task, or else that of the architecture in config.json."""
    kind = model_type(config, path)
    known = ARCHITECTURES[kind]
    tasks: list[Task] = [task for task in known if task]
    if wanted is not None and wanted not in tasks:
        raise RecipeError(
            f"{path}: expected a task of {kind}, {' or '.join(tasks)}; got {wanted!r}; load "
            "another folder or choose another task"
        )
    name = (config.get("architectures") or [None])[0]
    found = [task for task, names in known.items() if name in names]
    if name is not None and not found:
        raise RecipeError(
            f"{path / CONFIG}: expected an architecture of "
            f"{', '.join(one for names in known.values() for one in names)}; got {name!r}; no "
            "other is supported"
        )
    candidates: list[Any] = tasks if name is None else [task for task in found if task]
    if wanted is None and len(candidates) != 1:
        raise RecipeError(
            f"{path / CONFIG}: expected an architecture with a task; got {name!r}; choose the "
            f"task, {' or '.join(tasks)}"
        )
    return wanted or candidates[0]


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the label names of a config.json in the order of their ids; () if it has none."""
    names = config.get("id2label")
    if not isinstance(names, dict) or sorted(names) != sorted(map(str, range(len(names)))):
        return ()
    return tuple(str(names[str(index)]) for index in range(len(names)))


def labels_in(folder: str) -> tuple[str, ...]:
    """Return the label names of a folder's model in the order of their ids; () if it has none."""
    return labels_of(read_config(Path(folder)))


def validated(
    schema: Any,
    values: Mapping[str, Any],
    path: Path,
    *,
    key: str = "",
    inert: Set[str] | None = None,
    file: str = CONFIG,
) -> Any:
    """Validate values of a JSON file against a pydantic schema.

    Args:
      schema: The pydantic model.
      values: What the file, or its section `key`, holds.
      path: The folder, for messages.
      key: Name of the section.
      inert: If given, keys that are neither in the schema nor here are refused, as they may change
        what is computed.
      file: Name of the file.
    """
    if inert is not None:
        own = {field.alias or name for name, field in schema.model_fields.items()}
        for name, value in values.items():
            if name not in inert | own and value not in _OFF:
                raise RecipeError(
                    f"{path / file}: {name}: expected no key that is not known here; got "
                    f"{clipped(value)}, which may change what the model computes; if it does not, "
                    "remove it"
                )
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
