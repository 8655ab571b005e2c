"""Read the shape of a plain model from config.json.

The defaults are those of `transformers`, which leaves out of the file what is a default.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ..config import (
    Count,
    DecoderConfig,
    Flag,
    Fraction,
    GPTModelConfig,
    Positive,
    RopeConfig,
    Section,
    Whole,
)
from ..errors import RecipeError, clipped
from ._config import INERT, model_type, validated
from ._folder import CONFIG, read_config

_TANH = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
Activation = Annotated[
    Literal["silu", "gelu", "gelu_tanh"],
    BeforeValidator(lambda name: _TANH.get(name, name) if isinstance(name, str) else name),
]
LayerType = Literal["full_attention", "sliding_attention"]


# Rotary positions and windows


class _RopeFile(BaseModel):
    """`rope_parameters`, or the older `rope_scaling`."""

    model_config = ConfigDict(extra="forbid")

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: Flag = True


def read_rope(
    values: Mapping[str, Any], base: float, context: int, path: Path, key: str
) -> RopeConfig:
    """Read rotary positions; `base` and `context` are defaults for the section `key`.

    References:
      Peng et al., 2023, YaRN, section 3.4: queries and keys are multiplied by 0.1 ln(factor) + 1.
    """
    kind = values.get("rope_type", values.get("type", "default"))
    given = {name: value for name, value in values.items() if name != "type"}
    file = validated(_RopeFile, given | {"rope_type": kind}, path, key=key)
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    missing = [name for name in needed if getattr(file, name) is None]
    if kind != "default" and missing:
        raise RecipeError(
            f"{path / CONFIG}: {key}: expected rope_type {kind} with {', '.join(missing)}; got "
            f"{clipped(dict(values))}; copy the file again"
        )
    shape = {"base": file.rope_theta or base}
    if kind != "default":
        shape |= {"scaling": kind, "factor": file.factor}
    if kind in ("llama3", "yarn"):
        shape |= {"context": file.original_max_position_embeddings or context}
    if kind == "llama3":
        shape |= {"low_factor": file.low_freq_factor, "high_factor": file.high_freq_factor}
    if kind == "yarn":
        usual = 0.1 * math.log(file.factor) + 1 if file.factor > 1 else 1.0
        shape |= {"fast": file.beta_fast, "slow": file.beta_slow, "truncate": file.truncate}
        shape |= {"attention_factor": file.attention_factor or usual}
    return validated(RopeConfig, shape, path, key=key)


def _ropes(
    given: Mapping[str, Any], whole: float, local: float, context: int, path: Path
) -> dict[str, RopeConfig]:
    """Read rotary positions of global and local layers; `whole` and `local` are default bases."""
    bases = {"full_attention": whole, "sliding_attention": local}
    if extra := given.keys() - bases.keys():
        raise RecipeError(
            f"{path / CONFIG}: rope_parameters: expected {' and '.join(bases)}; got "
            f"{min(extra)}; copy the file again"
        )
    ropes = (
        read_rope(given.get(kind) or {}, base, context, path, f"rope_parameters.{kind}")
        for kind, base in bases.items()
    )
    return dict(zip(("rope", "local_rope"), ropes, strict=True))


def _local_layers(
    types: Sequence[LayerType] | None, usual: Sequence[bool], path: Path
) -> tuple[int, ...]:
    """Return the indices of local layers, by `layer_types` or else by the model's usual pattern."""
    if types is not None and len(types) != len(usual):
        raise RecipeError(
            f"{path / CONFIG}: expected layer_types of {len(usual)} layers; got {len(types)}; "
            "correct the file"
        )
    local = usual if types is None else [kind == "sliding_attention" for kind in types]
    return tuple(index for index, is_local in enumerate(local) if is_local)


def _gated_sizes(file: Any) -> dict[str, Any]:
    return {
        "library": "plain",
        "vocab": file.vocab_size,
        "width": file.hidden_size,
        "layers": file.num_hidden_layers,
        "heads": file.num_attention_heads,
        "mlp": "gated",
        "mlp_ratio": file.intermediate_size / file.hidden_size,
        "positions": "rope",
        "context": file.max_position_embeddings,
        "tied_readout": file.tie_word_embeddings,
    }


def _biases(file: Any) -> tuple[str, ...]:
    attention = getattr(file, "attention_bias", False)
    return (("qkv", "out") if attention else ()) + (
        ("mlp",) if getattr(file, "mlp_bias", False) else ()
    )


# GPT-2


class _Gpt2File(BaseModel):
    model_type: Literal["gpt2"]
    vocab_size: Count = 50257
    n_positions: Count = 1024
    n_embd: Count = 768
    n_layer: Count = 12
    n_head: Count = 12
    n_inner: Count | None = None
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] = "gelu_new"
    layer_norm_epsilon: Positive = 1e-5
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: Flag = True


def _gpt2(config: Mapping[str, Any], path: Path) -> GPTModelConfig:
    file = validated(_Gpt2File, config, path, inert=INERT)
    shape = {
        "library": "plain",
        "vocab": file.vocab_size,
        "width": file.n_embd,
        "layers": file.n_layer,
        "heads": file.n_head,
        "mlp_ratio": (file.n_inner or 4 * file.n_embd) / file.n_embd,
        "norm": "layer",
        "norm_eps": file.layer_norm_epsilon,
        "bias": True,
        "positions": "learned",
        "context": file.n_positions,
        "tied_readout": file.tie_word_embeddings,
    }
    return validated(GPTModelConfig, shape, path)


# The Llama family: the keys that each member has, and their defaults


class _Decoder(BaseModel):
    vocab_size: Count = 32000
    hidden_size: Count = 4096
    intermediate_size: Count = 11008
    num_hidden_layers: Count = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count = 2048
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: Flag = False
    rope_theta: Positive | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


class _Llama(_Decoder):
    hidden_act: Activation = "silu"
    attention_bias: Flag = False
    mlp_bias: Flag = False
    rope_interleaved: Literal[False] | None = None  # SmolLM2: another layout of the pairs


class _Mistral(_Decoder):
    intermediate_size: Count = 14336
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 131072
    hidden_act: Activation = "silu"
    sliding_window: Count | None = 4096


class _Qwen2(_Decoder):
    vocab_size: Count = 151936
    intermediate_size: Count = 22016
    num_key_value_heads: Count | None = 32
    max_position_embeddings: Count = 32768
    hidden_act: Activation = "silu"
    sliding_window: Count | None = 4096
    layer_types: list[LayerType] | None = None
    use_sliding_window: Flag = False
    max_window_layers: Annotated[int, Field(ge=0)] = 28


class _Qwen3(_Qwen2):
    head_dim: Count | None = 128
    attention_bias: Flag = False


class _Gemma2(_Decoder):
    vocab_size: Count = 256000
    hidden_size: Count = 2304
    intermediate_size: Count = 9216
    num_hidden_layers: Count = 26
    num_attention_heads: Count = 8
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 256
    max_position_embeddings: Count = 8192
    tie_word_embeddings: Flag = True
    hidden_activation: Activation = "gelu_tanh"
    hidden_act: Any = None  # left over: hidden_activation counts
    sliding_window: Count | None = 4096
    sliding_window_size: Any = None  # left over in 9B: sliding_window counts
    layer_types: list[LayerType] | None = None
    attention_bias: Flag = False
    query_pre_attn_scalar: Positive = 256
    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0
    use_bidirectional_attention: Literal[False] | None = None


class _Gemma3(_Gemma2):
    vocab_size: Count = 262208
    max_position_embeddings: Count = 131072
    attn_logit_softcapping: None = None  # `transformers` does not read it
    final_logit_softcapping: Positive | None = None
    sliding_window_pattern: Count = 6
    rope_local_base_freq: Positive | None = None


FAMILY: dict[str, type[_Decoder]] = {
    "llama": _Llama,
    "mistral": _Mistral,
    "qwen2": _Qwen2,
    "qwen3": _Qwen3,
    "gemma2": _Gemma2,
    "gemma3_text": _Gemma3,
}
"""The schema of each model type of the Llama family."""


def _usual_window(kind: str, file: Any, index: int) -> bool:
    """Whether a layer is local if there are no `layer_types`."""
    if kind == "mistral":
        return file.sliding_window is not None
    if kind in ("qwen2", "qwen3"):
        windowed = file.use_sliding_window and file.sliding_window is not None
        return windowed and index >= file.max_window_layers
    if kind == "gemma2":
        return index % 2 == 0
    return kind == "gemma3_text" and (index + 1) % file.sliding_window_pattern != 0


def _family(config: Mapping[str, Any], path: Path) -> GPTModelConfig:
    kind = config["model_type"]
    file = validated(FAMILY[kind], config, path, inert=INERT)
    context, gemma = file.max_position_embeddings, kind.startswith("gemma")
    get = dict(file).get  # None for keys that this member of the family does not have
    usual = [_usual_window(kind, file, index) for index in range(file.num_hidden_layers)]
    local = _local_layers(get("layer_types"), usual, path)
    if kind == "gemma3_text":
        given = file.rope_parameters or {}
        if file.rope_scaling:  # of layers that attend to the whole sequence
            whole = (given.get("full_attention") or {}) | file.rope_scaling
            given = given | {"full_attention": whole}
        local_base = file.rope_local_base_freq or 1e4
        ropes = _ropes(given, file.rope_theta or 1e6, local_base, context, path)
    else:
        key = "rope_scaling" if file.rope_scaling else "rope_parameters"
        given = file.rope_scaling or file.rope_parameters or {}
        ropes = {"rope": read_rope(given, file.rope_theta or 1e4, context, path, key)}
    decoder = {
        "head_dim": file.head_dim or file.hidden_size // file.num_attention_heads,
        "activation": get("hidden_activation") or get("hidden_act"),
        "biases": ("qkv",) if kind == "qwen2" else _biases(file),
        "query_key_norms": kind in ("qwen3", "gemma3_text"),
        "post_norms": gemma,
        "norm_offset": gemma,
        "embedding_scale": gemma,
        "attention_scale": file.query_pre_attn_scalar**-0.5 if gemma else None,
        "attention_cap": get("attn_logit_softcapping"),
        "logit_cap": get("final_logit_softcapping"),
        "window": get("sliding_window") if local else None,
        "local_layers": local,
        **ropes,
    }
    shape = {
        **_gated_sizes(file),
        "kv_heads": file.num_key_value_heads or file.num_attention_heads,
        "norm": "rms",
        "norm_eps": file.rms_norm_eps,
        "decoder": validated(DecoderConfig, decoder, path),
    }
    return validated(GPTModelConfig, shape, path)


# Encoders


def _classes(file: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of classes by the labels or the number in a file; {} if it has neither."""
    labels = file.get("id2label")
    count = len(labels) if isinstance(labels, dict) else file.get("num_labels")
    return {"classes": count} if count else {}


class BertConfig(Section):
    """The shape of a BERT or RoBERTa, read from its config.json."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    model_type: Literal["bert", "roberta"] = "bert"
    vocab: Count = Field(30522, alias="vocab_size")
    width: Count = Field(768, alias="hidden_size")
    layers: Count = Field(12, alias="num_hidden_layers")
    heads: Count = Field(12, alias="num_attention_heads")
    hidden: Count = Field(3072, alias="intermediate_size")
    context: Count = Field(512, alias="max_position_embeddings")
    segments: Count = Field(2, alias="type_vocab_size")
    norm_eps: Positive = Field(1e-12, alias="layer_norm_eps")
    activation: Literal["gelu", "gelu_new", "relu"] = Field("gelu", alias="hidden_act")
    dropout: Fraction = Field(0.1, alias="hidden_dropout_prob")
    tied_readout: Flag = Field(True, alias="tie_word_embeddings")
    classes: Count = 2
    pad: Whole | None = Field(None, alias="pad_token_id")
    # Variants that the model does not have.
    position_embedding_type: Literal["absolute"] = "absolute"
    is_decoder: Literal[False] = False
    add_cross_attention: Literal[False] = False
    # What a ModernBERT may leave out.
    norm_bias: Literal[True] = True
    head_bias: Literal[True] = True
    readout_bias: Literal[True] = True
    pooling: Literal["cls"] = "cls"

    @property
    def head_activation(self) -> str:
        """Activation of the head of masked language models."""
        return "gelu" if self.model_type == "roberta" else self.activation

    @property
    def padding(self) -> int | None:
        """The padding id, from which RoBERTa counts positions; None for BERT."""
        return self.pad if self.model_type == "roberta" else None

    @property
    def longest(self) -> int:
        """Length of the longest sequence."""
        return self.context if self.padding is None else self.context - self.padding - 1

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, file: dict[str, Any]) -> dict[str, Any]:
        roberta = {"vocab_size": 50265, "pad_token_id": 1}
        return (roberta if file.get("model_type") == "roberta" else {}) | _classes(file) | file

    @model_validator(mode="after")
    def _shape_fits(self) -> Self:
        if self.model_type == "roberta" and (self.pad is None or self.longest < 1):
            raise ValueError(
                "a pad_token_id below max_position_embeddings - 1, as positions count from it; got "
                f"{self.pad} and {self.context}; correct the file"
            )
        if self.width % self.heads:
            raise ValueError(
                "num_attention_heads that divide hidden_size; got "
                f"{self.heads} and {self.width}; correct the file"
            )
        return self


class ModernBertConfig(GPTModelConfig):
    """The shape of a ModernBERT: bidirectional GPT layers, and its heads.

    `decoder.window` counts the tokens on one side that a local layer attends to, its own included.
    """

    norm_bias: Flag = False
    head_bias: Flag = False
    readout_bias: Flag = True
    head_activation: str = "gelu"
    pooling: Literal["cls", "mean"] = "cls"
    classes: Count = 2

    @property
    def longest(self) -> int:
        """Length of the longest sequence."""
        assert self.context is not None, "a folder states the longest sequence"
        return self.context


class _ModernFile(BaseModel):
    vocab_size: Count = 50368
    hidden_size: Count = 768
    intermediate_size: Count = 1152
    num_hidden_layers: Count = 22
    num_attention_heads: Count = 12
    hidden_activation: Activation = "gelu"
    max_position_embeddings: Count = 8192
    norm_eps: Positive = 1e-5
    norm_bias: Flag = False
    attention_bias: Flag = False
    mlp_bias: Flag = False
    decoder_bias: Flag = True
    classifier_bias: Flag = False
    classifier_activation: Literal["gelu", "relu"] = "gelu"
    classifier_pooling: Literal["cls", "mean"] = "cls"
    mlp_dropout: Fraction = 0.0
    local_attention: Count = 128
    global_attn_every_n_layers: Count = 3
    layer_types: list[LayerType] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: None = None
    global_rope_theta: Positive | None = None
    local_rope_theta: Positive | None = None
    tie_word_embeddings: Flag = True
    position_embedding_type: Literal["absolute", "sans_pos"] = "absolute"  # left over: rotary


def _modernbert(config: Mapping[str, Any], path: Path) -> ModernBertConfig:
    file = validated(_ModernFile, config, path, inert=INERT)
    every = file.global_attn_every_n_layers
    usual = [index % every != 0 for index in range(file.num_hidden_layers)]
    local = _local_layers(file.layer_types, usual, path)
    bases = file.global_rope_theta or 160000.0, file.local_rope_theta or 10000.0
    ropes = _ropes(file.rope_parameters or {}, *bases, file.max_position_embeddings, path)
    decoder = {
        "activation": file.hidden_activation,
        "biases": _biases(file),
        "window": file.local_attention // 2 + 1 if local else None,
        "local_layers": local,
        **ropes,
    }
    shape = {
        **_gated_sizes(file),
        "norm": "layer",
        "norm_eps": file.norm_eps,
        "norm_bias": file.norm_bias,
        "dropout": file.mlp_dropout,
        "head_bias": file.classifier_bias,
        "readout_bias": file.decoder_bias,
        "head_activation": file.classifier_activation,
        "pooling": file.classifier_pooling,
        "decoder": decoder,
    }
    return validated(ModernBertConfig, shape | _classes(config), path)


def _bert(config: Mapping[str, Any], path: Path) -> BertConfig:
    return validated(BertConfig, config, path, inert=INERT)


DECODERS: dict[str, Callable[[Mapping[str, Any], Path], GPTModelConfig]] = {
    "gpt2": _gpt2,
    **dict.fromkeys(FAMILY, _family),
}
ENCODERS: dict[str, Callable[[Mapping[str, Any], Path], BertConfig | ModernBertConfig]] = {
    "bert": _bert,
    "roberta": _bert,
    "modernbert": _modernbert,
}
"""Readers of shapes by model type."""


def shape_of_decoder(folder: str) -> GPTModelConfig:
    """Read the shape of the decoder in a folder; only config.json is opened."""
    path, file = Path(folder), read_config(Path(folder))
    return DECODERS[model_type(file, path, DECODERS)](file, path)


def shape_of_bert(folder: str) -> BertConfig | ModernBertConfig:
    """Read the shape of the encoder in a folder; only config.json is opened."""
    path, file = Path(folder), read_config(Path(folder))
    return ENCODERS[model_type(file, path, ENCODERS)](file, path)
