"""From the config.json of an encoder to the shape of a plain one: BERT, RoBERTa and ModernBERT.

The defaults are those of `transformers`, which leaves out of the file what is a default.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..config import Count, Flag, Fraction, GPTModelConfig, Positive, Section, Whole
from ._decoders import Activation, LayerType, attention_biases, local_layers
from ._positions import rope_of
from ._schema import known_only, validated


def _classes(file: dict[str, Any]) -> dict[str, int]:
    """How many classes there are, of which a file has the names or the number."""
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

    @property
    def head_activation(self) -> str:
        """That of the head of masked language models."""
        return "gelu" if self.model_type == "roberta" else self.activation

    @property
    def padding(self) -> int | None:
        """The id after which RoBERTa counts positions; None for BERT, which counts from 0."""
        return self.pad if self.model_type == "roberta" else None

    @property
    def longest(self) -> int:
        """Positions that tokens can have."""
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
    """The shape of a ModernBERT: layers as a GPT's, which attend both ways, and its heads.

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
        """Positions that tokens can have."""
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
    # Left over: positions are rotary.
    position_embedding_type: Literal["absolute", "sans_pos"] = "absolute"
    num_labels: Count | None = None


# Beside those of every file, what only draws, pads or trains.
_INERT = {
    *("initializer_cutoff_factor", "deterministic_flash_attn", "reference_compile"),
    *("embedding_dropout", "classifier_dropout", "layer_norm_eps"),
    *("repad_logits_with_grad", "sparse_prediction", "sparse_pred_ignore_index"),
}


def modern_shape(config: dict[str, Any], path: Path) -> ModernBertConfig:
    """The ModernBERT that a config.json describes."""
    known_only(config, _ModernFile, path, _INERT)
    file = validated(_ModernFile, config, path)
    local = local_layers(
        file.layer_types,
        [index % file.global_attn_every_n_layers != 0 for index in range(file.num_hidden_layers)],
        path,
    )
    ropes = rope_of(
        file.rope_parameters,
        {
            "full_attention": file.global_rope_theta or 160000.0,
            "sliding_attention": file.local_rope_theta or 10000.0,
        },
        file.max_position_embeddings,
        path,
    )
    mlp = ("mlp",) if file.mlp_bias else ()
    shape = {
        "library": "plain",
        "vocab": file.vocab_size,
        "width": file.hidden_size,
        "layers": file.num_hidden_layers,
        "heads": file.num_attention_heads,
        "mlp": "gated",
        "mlp_ratio": file.intermediate_size / file.hidden_size,
        "norm": "layer",
        "norm_eps": file.norm_eps,
        "norm_bias": file.norm_bias,
        "positions": "rope",
        "context": file.max_position_embeddings,
        "dropout": file.mlp_dropout,
        "tied_readout": file.tie_word_embeddings,
        "head_bias": file.classifier_bias,
        "readout_bias": file.decoder_bias,
        "head_activation": file.classifier_activation,
        "pooling": file.classifier_pooling,
        "decoder": {
            "activation": file.hidden_activation,
            "biases": attention_biases(file.attention_bias) + mlp,
            "window": file.local_attention // 2 + 1 if local else None,
            "local_layers": local,
            "rope": ropes["full_attention"],
            "local_rope": ropes["sliding_attention"],
        },
    }
    return validated(ModernBertConfig, shape | _classes(config), path)


# Dropout, and what multilingual BERTs say of their pooler, which is that of all others.
_BERT_INERT = {
    *("attention_probs_dropout_prob", "classifier_dropout", "directionality"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type"),
}


def bert_shape(config: dict[str, Any], path: Path) -> BertConfig:
    """The BERT or RoBERTa that a config.json describes."""
    known_only(config, BertConfig, path, _BERT_INERT)
    return validated(BertConfig, config, path)


ENCODERS: dict[str, Callable[[dict[str, Any], Path], BertConfig | ModernBertConfig]] = {
    "bert": bert_shape,
    "roberta": bert_shape,
    "modernbert": modern_shape,
}
"""What reads the shape of an encoder, by model type."""
