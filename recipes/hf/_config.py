"""Supported models and tasks, and reading a model's shape from config.json.

Sizes must be in the file (`head_dim`, if it is not width / heads); other keys have the defaults of
`transformers`. Unknown keys are errors, because they may change what the model computes.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from ..config import (
    Count,
    DecoderConfig,
    Flag,
    Fraction,
    GPTModelConfig,
    Positive,
    RopeConfig,
    Whole,
)
from ..errors import RecipeError, clipped
from ._folder import CONFIG, QUANTIZATION, read_config

Task = Literal["lm", "masked_lm", "question_answering", "classification"]


def _encoder(name: str, *pretraining: str) -> dict[Task | None, tuple[str, ...]]:
    return {
        "masked_lm": (f"{name}ForMaskedLM", *pretraining),
        "question_answering": (f"{name}ForQuestionAnswering",),
        "classification": (f"{name}ForSequenceClassification",),
        None: (f"{name}Model",),
    }


ARCHITECTURES: dict[str, dict[Task | None, tuple[str, ...]]] = {
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
"""Architecture names by model type and task (None: no head); `save` writes the first one."""

# Keys that do not change what these models compute: file names, ids, generation, dropout and other
# training settings, execution, heads that are not loaded, and aliases.
INERT = re.compile(
    r"_.*|.*transformers.*|.*_token_id|.*dropout.*|.*_pdrop|.*penalty|.*attn_impl.*|"
    r"(bos|eos|forced|keys|num_beam|num_return|output|pooler|return_dict|summary|unsloth)_.*|"
    r"(use_)?return_dict|use_cache|cache_implementation|num_beams|min_length|early_stopping|"
    r"(tokenizer_model_|model_)?max_(sequence_)?length|do_sample|diversity_.*|temperature|"
    r"top_[kp]|typical_p|(encoder_)?no_repeat_ngram_size|bad_words_ids|(begin_)?suppress_tokens|"
    r"name_or_path|architectures|auto_map|model_type|(torch_)?dtype|prefix|is_llama_config|"
    r"tokenizer_class|id2label|label2id|num_labels|problem_type|finetuning_task|initializer_.*|"
    r"gradient_checkpointing|neftune_noise_alpha|pretraining_tp|torchscript|n_ctx|n_special|"
    r"chunk_size_feed_forward|task_specific_params|remove_invalid_values|directionality|"
    r"reorder_and_upcast_attn|predict_special_tokens|layer_norm_eps|deterministic_flash_attn|"
    r"reference_compile|repad_logits_with_grad|sparse_pred.*|sliding_window_size"
)


def model_type(
    config: Mapping[str, Any], path: Path, kinds: Collection[str] = tuple(ARCHITECTURES)
) -> str:
    """Return the model type of a config.json; refuse unsupported types and custom model code."""
    kind: Any = config.get("model_type")
    if kind not in kinds:
        what = f"{path / CONFIG}: expected model_type {', '.join(kinds)}"
        raise RecipeError(f"{what}; got {kind!r}; give the folder of a supported model")
    # Custom code may compute something else under a standard name: MosaicBERT is "BertForMaskedLM"
    # with ALiBi. Custom tokenizers are fine, because tokenizer.json is read instead.
    if {**(config.get("auto_map") or {})}.keys() - {"AutoTokenizer"}:
        raise RecipeError(
            f"{path / CONFIG}: auto_map: expected no custom code for the model; got "
            f"{clipped(config['auto_map'])}, which is not run; remove auto_map if the standard "
            "architecture computes the same"
        )
    return kind


def task_of(config: Mapping[str, Any], wanted: Task | None, path: Path) -> Task:
    """Return the requested task; the default is that of the architecture in config.json."""
    kind = model_type(config, path)
    names: Any = {name: task for task, own in ARCHITECTURES[kind].items() for name in own}
    tasks: list[Any] = [task for task in ARCHITECTURES[kind] if task is not None]
    (name,) = (config.get("architectures") or [None])[:1]
    task: Any = wanted or names.get(name) or (tasks[0] if len(tasks) == 1 else None)
    if task not in tasks or name not in (None, *names):
        raise RecipeError(
            f"{path / CONFIG}: expected a task of {kind}, {' or '.join(tasks)}, and one of "
            f"{', '.join(names)}; got {wanted!r} and {name!r}; choose another task or folder"
        )
    return task


def validated(
    schema: Any,
    values: Mapping[str, Any],
    path: Path,
    *,
    inert: re.Pattern[str] | None = None,
    file: str = CONFIG,
) -> Any:
    """Validate the contents of a JSON file in the folder `path` with a pydantic schema.

    If `inert` is given, refuse keys that neither it nor the schema has, unless null or false.
    """
    if inert is not None:
        own = {field.alias or name for name, field in schema.model_fields.items()}
        for name, value in values.items():
            if value and name not in own and not inert.fullmatch(name):
                raise RecipeError(
                    f"{path / file}: {name}: expected no unknown key; got {clipped(value)}, which "
                    "may change what the model computes; remove it if it does not"
                )
    try:
        return schema(**values)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the shape"
        got = "" if problem["type"] == "value_error" else f"; got {clipped(problem['input'])}"
        raise RecipeError(
            f"{path / file}: {where}: {problem['msg']}{got}; no other variant is supported"
        ) from error


_TANH = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
Activation = Annotated[
    Literal["silu", "gelu", "gelu_tanh"],
    BeforeValidator(lambda name: _TANH.get(name, name) if isinstance(name, str) else name),
]
LayerType = Literal["full_attention", "sliding_attention"]

_ROPE_KEYS = {
    "type": "scaling",
    "rope_type": "scaling",
    "rope_theta": "base",
    "low_freq_factor": "low_factor",
    "high_freq_factor": "high_factor",
    "original_max_position_embeddings": "context",
    "beta_fast": "fast",
    "beta_slow": "slow",
}
_FACTORS = {"linear": {"factor"}, "yarn": {"factor"}}
_FACTORS["llama3"] = {"factor", "low_freq_factor", "high_freq_factor"}


def _rope(values: Mapping[str, Any], base: float, context: int, path: Path) -> RopeConfig:
    """Read `rope_parameters` or the older `rope_scaling`; `base` and `context` are defaults."""
    given = {name: value for name, value in values.items() if value is not None}
    shape: Any = {"base": base} | {_ROPE_KEYS.get(name, name): x for name, x in given.items()}
    kind = shape.get("scaling", "default")
    if kind == "default":
        return RopeConfig(base=shape["base"])
    if missing := _FACTORS.get(kind, set()) - given.keys():
        what = f"{path / CONFIG}: expected rope_type {kind} with {', '.join(sorted(missing))}"
        raise RecipeError(f"{what}; got {clipped(given)}; copy the file again")
    if kind != "linear":
        shape.setdefault("context", context)
    if kind != "yarn":
        shape.pop("attention_factor", None)
    elif shape["factor"] > 1:  # Peng et al., 2023, YaRN, section 3.4
        shape.setdefault("attention_factor", 0.1 * math.log(shape["factor"]) + 1)
    return validated(RopeConfig, shape, path)


def _ropes(
    given: Mapping[str, Any], whole: float, local: float, context: int, path: Path
) -> dict[str, RopeConfig]:
    """Read the RoPE of global and local layers, with the default bases `whole` and `local`."""
    kinds = {"full_attention": ("rope", whole), "sliding_attention": ("local_rope", local)}
    if extra := given.keys() - kinds.keys():
        what = f"{path / CONFIG}: rope_parameters: expected {' and '.join(kinds)}"
        raise RecipeError(f"{what}; got {min(extra)}")
    return {
        name: _rope(given.get(kind) or {}, base, context, path)
        for kind, (name, base) in kinds.items()
    }


def _local_layers(
    types: Sequence[LayerType] | None, usual: Sequence[bool], path: Path
) -> tuple[int, ...]:
    """Return the indices of local layers, from `layer_types` or the model's `usual` pattern."""
    if types is not None and len(types) != len(usual):
        what = f"{path / CONFIG}: expected layer_types of {len(usual)} layers"
        raise RecipeError(f"{what}; got {len(types)}; correct the file")
    local = usual if types is None else [kind == "sliding_attention" for kind in types]
    return tuple(index for index, is_local in enumerate(local) if is_local)


class _Sizes(BaseModel):
    """Fields are named as in our configs, with the keys of config.json as aliases."""

    vocab: Count = Field(alias="vocab_size")
    width: Count = Field(alias="hidden_size")
    hidden: Count | None = Field(alias="intermediate_size")
    layers: Count = Field(alias="num_hidden_layers")
    heads: Count = Field(alias="num_attention_heads")
    context: Count = Field(alias="max_position_embeddings")
    tied_readout: Flag = Field(True, alias="tie_word_embeddings")
    fp8: Annotated[bool, BeforeValidator(bool)] = Field(False, alias=QUANTIZATION)


def _shape(schema: Any, file: Any, path: Path, variant: Any, **own: Any) -> Any:
    """Build a model's config from a file; `variant` (of its decoder) and `own` override it."""
    variant = file.model_dump(include=set(DecoderConfig.model_fields)) | variant
    shape = {
        "library": "plain",
        "mlp_ratio": (file.hidden or 4 * file.width) / file.width,
        "decoder": variant,
        **file.model_dump(include=set(schema.model_fields) - set(DecoderConfig.model_fields)),
    }
    return validated(schema, shape | own, path)


def _biases(file: Any) -> tuple[str, ...]:
    """Return the linear layers that have a bias."""
    attention, mlp = (getattr(file, f"{part}_bias", False) for part in ("attention", "mlp"))
    return ("qkv", "out") * attention + ("mlp",) * mlp


class _Gpt2(_Sizes):
    width: Count = Field(alias="n_embd")
    hidden: Count | None = Field(None, alias="n_inner")
    layers: Count = Field(alias="n_layer")
    heads: Count = Field(alias="n_head")
    context: Count = Field(alias="n_positions")
    norm_eps: Positive = Field(1e-5, alias="layer_norm_epsilon")
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] = "gelu_new"
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False


class _Decoder(_Sizes):
    kv_heads: Count | None = Field(None, alias="num_key_value_heads")
    head_dim: Count | None = None
    context: Count = Field(2048, alias="max_position_embeddings")  # missing in the first Llamas
    norm_eps: Positive = Field(1e-6, alias="rms_norm_eps")
    tied_readout: Flag = Field(False, alias="tie_word_embeddings")
    activation: Activation = Field("silu", alias="hidden_act")
    rope_theta: Positive | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


class _Llama(_Decoder):
    attention_bias: Flag = False
    mlp_bias: Flag = False
    rope_interleaved: Literal[False] | None = None  # SmolLM2: another layout of the pairs


class _Mistral(_Decoder):
    window: Count | None = Field(4096, alias="sliding_window")


class _Qwen2(_Mistral):
    layer_types: list[LayerType] | None = None
    use_sliding_window: Flag = False
    max_window_layers: Whole = 28


class _Qwen3(_Qwen2):
    attention_bias: Flag = False


class _Gemma2(_Mistral):
    tied_readout: Flag = Field(True, alias="tie_word_embeddings")
    activation: Activation = Field("gelu_tanh", alias="hidden_activation")
    hidden_act: Any = None  # ignored in favor of hidden_activation
    layer_types: list[LayerType] | None = None
    attention_bias: Flag = False
    query_pre_attn_scalar: Positive = 256
    attention_cap: Positive | None = Field(50.0, alias="attn_logit_softcapping")
    logit_cap: Positive | None = Field(30.0, alias="final_logit_softcapping")
    use_bidirectional_attention: Literal[False] | None = None


class _Gemma3(_Gemma2):
    attention_cap: None = Field(None, alias="attn_logit_softcapping")  # not read by `transformers`
    logit_cap: Positive | None = Field(None, alias="final_logit_softcapping")
    rope_scaling: None = None
    sliding_window_pattern: Count = 6
    rope_local_base_freq: Positive = 1e4


_FAMILY: dict[str, type[_Decoder]] = {
    "llama": _Llama,
    "mistral": _Mistral,
    "qwen2": _Qwen2,
    "qwen3": _Qwen3,
    "gemma2": _Gemma2,
    "gemma3_text": _Gemma3,
}


def _usual_window(kind: str, file: Any, index: int) -> bool:
    """Return True if a layer is local by default, without `layer_types`."""
    if kind.startswith("qwen"):
        return file.use_sliding_window and bool(file.window) and index >= file.max_window_layers
    if kind == "gemma3_text":
        return (index + 1) % file.sliding_window_pattern != 0
    return (kind == "mistral" and bool(file.window)) or (kind == "gemma2" and index % 2 == 0)


def _family(config: Mapping[str, Any], path: Path) -> GPTModelConfig:
    kind = config["model_type"]
    file = validated(_FAMILY[kind], config, path, inert=INERT)
    gemma = kind.startswith("gemma")
    usual = [_usual_window(kind, file, index) for index in range(file.layers)]
    local = _local_layers(getattr(file, "layer_types", None), usual, path)
    if kind == "gemma3_text":
        bases = file.rope_theta or 1e6, file.rope_local_base_freq
        ropes = _ropes(file.rope_parameters or {}, *bases, file.context, path)
    else:
        given = file.rope_scaling or file.rope_parameters or {}
        ropes = {"rope": _rope(given, file.rope_theta or 1e4, file.context, path)}
    decoder = {
        "head_dim": file.head_dim or file.width // file.heads,
        "biases": ("qkv",) if kind == "qwen2" else _biases(file),
        "query_key_norms": kind in ("qwen3", "gemma3_text"),
        "post_norms": gemma,
        "norm_offset": gemma,
        "embedding_scale": gemma,
        "attention_scale": file.query_pre_attn_scalar**-0.5 if gemma else None,
        "window": file.window if local else None,
        "local_layers": local,
        **ropes,
    }
    own = {"mlp": "gated", "kv_heads": file.kv_heads or file.heads, "norm": "rms"}
    return _shape(GPTModelConfig, file, path, decoder, **own)


def _gpt2(config: Mapping[str, Any], path: Path) -> GPTModelConfig:
    file = validated(_Gpt2, config, path, inert=INERT)
    own = {"norm": "layer", "bias": True, "positions": "learned"}
    return _shape(GPTModelConfig, file, path, {}, **own)


class EncoderConfig(GPTModelConfig):
    """The shape of a BERT, RoBERTa or ModernBERT, and of its heads."""

    modern: Flag = False
    segments: Count = 2
    padding: Whole | None = None  # RoBERTa's positions start at this id + 1
    norm_bias: Flag = True
    head_bias: Flag = True
    readout_bias: Flag = True
    head_activation: Activation = "gelu"
    pooling: Literal["cls", "mean"] = "cls"
    classes: Count = 2
    labels: tuple[str, ...] = ()  # names of the classes, if the folder has them

    @property
    def longest(self) -> int:
        """Length of the longest sequence."""
        assert self.context is not None, "a folder states the longest sequence"
        return self.context if self.padding is None else self.context - self.padding - 1


class _Bert(_Sizes):
    segments: Count = Field(2, alias="type_vocab_size")
    norm_eps: Positive = Field(1e-12, alias="layer_norm_eps")
    activation: Activation = Field("gelu", alias="hidden_act")
    dropout: Fraction = Field(0.1, alias="hidden_dropout_prob")
    pad_token_id: Whole | None = None
    position_embedding_type: Literal["absolute"] = "absolute"
    is_decoder: Literal[False] = False
    add_cross_attention: Literal[False] = False


class _ModernBert(_Sizes):
    activation: Activation = Field("gelu", alias="hidden_activation")
    norm_eps: Positive = 1e-5
    norm_bias: Flag = False
    attention_bias: Flag = False
    mlp_bias: Flag = False
    dropout: Fraction = Field(0.0, alias="mlp_dropout")
    readout_bias: Flag = Field(True, alias="decoder_bias")
    head_bias: Flag = Field(False, alias="classifier_bias")
    head_activation: Activation = Field("gelu", alias="classifier_activation")
    pooling: Literal["cls", "mean"] = Field("cls", alias="classifier_pooling")
    local_attention: Count = 128
    global_attn_every_n_layers: Count = 3
    layer_types: list[LayerType] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: None = None
    global_rope_theta: Positive = 160000.0
    local_rope_theta: Positive = 10000.0
    position_embedding_type: Literal["absolute", "sans_pos"] = "absolute"  # ignored: it has RoPE


def _classes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of classes and their labels by id, if the file has them."""
    names = config.get("id2label") or {}
    ids = [str(index) for index in range(len(names))]
    labels = tuple(str(names[index]) for index in ids) if names.keys() == {*ids} else ()
    count = len(names) or config.get("num_labels")
    return {"classes": count, "labels": labels} if count else {}


def _bert(config: Mapping[str, Any], path: Path) -> EncoderConfig:
    file = validated(_Bert, config, path, inert=INERT)
    own = {"norm": "layer", "bias": True, "positions": "learned", **_classes(config)}
    if config["model_type"] == "roberta":
        own |= {"padding": 1 if file.pad_token_id is None else file.pad_token_id}
    else:
        own |= {"head_activation": file.activation}
    return _shape(EncoderConfig, file, path, {}, **own)


def _modernbert(config: Mapping[str, Any], path: Path) -> EncoderConfig:
    file = validated(_ModernBert, config, path, inert=INERT)
    usual = [index % file.global_attn_every_n_layers != 0 for index in range(file.layers)]
    local = _local_layers(file.layer_types, usual, path)
    bases = file.global_rope_theta, file.local_rope_theta
    decoder = {
        "biases": _biases(file),
        "window": file.local_attention // 2 + 1 if local else None,
        "local_layers": local,
        **_ropes(file.rope_parameters or {}, *bases, file.context, path),
    }
    own = {"mlp": "gated", "norm": "layer", "modern": True, **_classes(config)}
    return _shape(EncoderConfig, file, path, decoder, **own)


def shape_in(config: Mapping[str, Any], path: Path) -> Any:
    """Read the shape from the contents of a config.json; messages name `path`."""
    readers: Any = {"gpt2": _gpt2, "bert": _bert, "roberta": _bert, "modernbert": _modernbert}
    return readers.get(config["model_type"], _family)(config, path)


def shape_of(folder: str, task: Task) -> Any:
    """Read the shape of a model for a task from the config.json in a folder alone."""
    path = Path(folder)
    config = read_config(path)
    model_type(config, path, [kind for kind, tasks in ARCHITECTURES.items() if task in tasks])
    return shape_in(config, path)
