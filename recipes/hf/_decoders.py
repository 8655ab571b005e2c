"""From the config.json of a decoder to the shape of a plain GPT: GPT-2 and the Llama family.

The defaults are those of `transformers`, which leaves out of the file what is a default.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ..config import Count, DecoderConfig, Flag, GPTModelConfig, Positive
from ..errors import RecipeError
from ._folder import CONFIG
from ._positions import read_rope, rope_of
from ._schema import known_only, validated

Activation = Annotated[
    Literal["silu", "gelu", "gelu_tanh"],
    BeforeValidator(lambda name: _TANH.get(name, name) if isinstance(name, str) else name),
]
_TANH = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
LayerType = Literal["full_attention", "sliding_attention"]


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


# What only drops in training, is of heads that a language model has not, or is a second name.
_GPT2_INERT = {
    *("n_ctx", "resid_pdrop", "embd_pdrop", "attn_pdrop", "reorder_and_upcast_attn"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout"),
    *("summary_proj_to_labels", "n_special", "predict_special_tokens"),
}


def gpt2_shape(config: dict[str, Any], path: Path) -> GPTModelConfig:
    """The GPT that a GPT-2's config.json describes."""
    known_only(config, _Gpt2File, path, _GPT2_INERT)
    file = validated(_Gpt2File, config, path)
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


class _Decoder(BaseModel):
    """What every file of the family has, with Llama's defaults."""

    model_config = ConfigDict(extra="ignore")

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

    def variant(self, path: Path) -> dict[str, Any]:
        """What `DecoderConfig` is told, beside the size of heads and rotary positions."""
        raise NotImplementedError("each family tells its own")

    def rotary(self, path: Path) -> dict[str, Any]:
        """The `rope` of `DecoderConfig`, and `local_rope` where there is one."""
        key = "rope_scaling" if self.rope_scaling else "rope_parameters"
        values = self.rope_scaling or self.rope_parameters or {}
        base, context = self.rope_theta or 10000.0, self.max_position_embeddings
        return {"rope": read_rope(values, base, context, path, key)}


def local_layers(types: list[LayerType] | None, usual: list[bool], path: Path) -> tuple[int, ...]:
    """Layers that attend to a window, by `layer_types` or, where there is none, as is usual."""
    if types is not None and len(types) != len(usual):
        raise RecipeError(
            f"{path / CONFIG}: expected layer_types of {len(usual)} layers; got {len(types)}; "
            "correct the file"
        )
    local = usual if types is None else [kind == "sliding_attention" for kind in types]
    return tuple(index for index, is_local in enumerate(local) if is_local)


def attention_biases(attention_bias: bool) -> tuple[str, ...]:
    return ("qkv", "out") if attention_bias else ()


class _Llama(_Decoder):
    hidden_act: Activation = "silu"
    attention_bias: Flag = False
    mlp_bias: Flag = False
    rope_interleaved: Literal[False] | None = None  # SmolLM2: another layout of the pairs

    def variant(self, path: Path) -> dict[str, Any]:
        mlp = ("mlp",) if self.mlp_bias else ()
        return {
            "activation": self.hidden_act,
            "biases": attention_biases(self.attention_bias) + mlp,
        }


class _Mistral(_Decoder):
    intermediate_size: Count = 14336
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 131072
    hidden_act: Activation = "silu"
    sliding_window: Count | None = 4096

    def variant(self, path: Path) -> dict[str, Any]:
        local = range(self.num_hidden_layers) if self.sliding_window else ()
        return {
            "activation": self.hidden_act,
            "window": self.sliding_window,
            "local_layers": tuple(local),
        }


class _Layered(_Decoder):
    """Layers of which some attend to a window only."""

    sliding_window: Count | None = 4096
    layer_types: list[LayerType] | None = None

    def local(self, index: int) -> bool:
        """Whether a layer is local where `layer_types` does not say."""
        raise NotImplementedError("each family has its own pattern")

    def windows(self, path: Path) -> dict[str, Any]:
        usual = [self.local(index) for index in range(self.num_hidden_layers)]
        layers = local_layers(self.layer_types, usual, path)
        return {"window": self.sliding_window if layers else None, "local_layers": layers}


class _Qwen2(_Layered):
    vocab_size: Count = 151936
    intermediate_size: Count = 22016
    num_key_value_heads: Count | None = 32
    max_position_embeddings: Count = 32768
    hidden_act: Activation = "silu"
    use_sliding_window: Flag = False
    max_window_layers: Annotated[int, Field(ge=0)] = 28

    def local(self, index: int) -> bool:
        windowed = self.use_sliding_window and self.sliding_window is not None
        return windowed and index >= self.max_window_layers

    def variant(self, path: Path) -> dict[str, Any]:
        return {"activation": self.hidden_act, "biases": ("qkv",), **self.windows(path)}


class _Qwen3(_Qwen2):
    head_dim: Count | None = 128
    attention_bias: Flag = False

    def variant(self, path: Path) -> dict[str, Any]:
        biases = attention_biases(self.attention_bias)
        return {**super().variant(path), "biases": biases, "query_key_norms": True}


class _Gemma2(_Layered):
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
    sliding_window_size: Count | None = None  # left over, of 9B: sliding_window counts
    attention_bias: Flag = False
    query_pre_attn_scalar: Positive = 256
    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0
    use_bidirectional_attention: Literal[False] | None = None

    def local(self, index: int) -> bool:
        return index % 2 == 0

    def variant(self, path: Path) -> dict[str, Any]:
        if self.sliding_window_size not in (None, self.sliding_window):
            raise RecipeError(
                f"{path / CONFIG}: sliding_window_size: expected sliding_window, "
                f"{self.sliding_window}; got {self.sliding_window_size}; correct the file"
            )
        return {
            "activation": self.hidden_activation,
            "biases": attention_biases(self.attention_bias),
            "post_norms": True,
            "norm_offset": True,
            "embedding_scale": True,
            "attention_scale": self.query_pre_attn_scalar**-0.5,
            "attention_cap": self.attn_logit_softcapping,
            "logit_cap": self.final_logit_softcapping,
            **self.windows(path),
        }


class _Gemma3(_Gemma2):
    vocab_size: Count = 262208
    max_position_embeddings: Count = 131072
    attn_logit_softcapping: None = None  # `transformers` does not read it
    final_logit_softcapping: Positive | None = None
    sliding_window_pattern: Count = 6
    rope_local_base_freq: Positive | None = None

    def local(self, index: int) -> bool:
        return (index + 1) % self.sliding_window_pattern != 0

    def variant(self, path: Path) -> dict[str, Any]:
        return {**super().variant(path), "query_key_norms": True}

    def rotary(self, path: Path) -> dict[str, Any]:
        """Positions of each kind of layer; what scales them is for those of the whole sequence."""
        bases = {
            "full_attention": self.rope_theta or 1e6,
            "sliding_attention": self.rope_local_base_freq or 1e4,
        }
        given = self.rope_parameters or {}
        if self.rope_scaling:
            whole = (given.get("full_attention") or {}) | self.rope_scaling
            given = given | {"full_attention": whole}
        ropes = rope_of(given, bases, self.max_position_embeddings, path)
        return {"rope": ropes["full_attention"], "local_rope": ropes["sliding_attention"]}


FAMILY: dict[str, type[_Decoder]] = {
    "llama": _Llama,
    "mistral": _Mistral,
    "qwen2": _Qwen2,
    "qwen3": _Qwen3,
    "gemma2": _Gemma2,
    "gemma3_text": _Gemma3,
}
"""The schema of each model type of the family."""


def family_shape(config: dict[str, Any], path: Path) -> GPTModelConfig:
    """The GPT that the config.json of a decoder of the Llama family describes."""
    schema = FAMILY[config["model_type"]]
    known_only(config, schema, path)
    file = validated(schema, config, path)
    variant = file.variant(path)
    size = file.head_dim or file.hidden_size // file.num_attention_heads
    decoder = variant | file.rotary(path) | {"head_dim": size}
    shape = {
        "library": "plain",
        "vocab": file.vocab_size,
        "width": file.hidden_size,
        "layers": file.num_hidden_layers,
        "heads": file.num_attention_heads,
        "kv_heads": file.num_key_value_heads or file.num_attention_heads,
        "mlp": "gated",
        "mlp_ratio": file.intermediate_size / file.hidden_size,
        "norm": "rms",
        "norm_eps": file.rms_norm_eps,
        "positions": "rope",
        "context": file.max_position_embeddings,
        "tied_readout": file.tie_word_embeddings,
        "decoder": validated(DecoderConfig, decoder, path),
    }
    return validated(GPTModelConfig, shape, path)


DECODERS: dict[str, Callable[[dict[str, Any], Path], GPTModelConfig]] = {
    "gpt2": gpt2_shape,
    **dict.fromkeys(FAMILY, family_shape),
}
"""What reads the shape of a plain GPT, by model type."""
