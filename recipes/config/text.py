"""The config of runs on text: tokenizer, batches, and the shapes of Transformers."""

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, Strict, ValidationInfo, field_validator, model_validator
from tokenizers import Tokenizer

from ..errors import RecipeError, read_text
from .run import BatchConfig, Count, Flag, Fraction, Positive, RunConfig, Section, Whole

Positions = Literal["rope", "learned"]
Target = Literal["query", "key", "value", "out", "gate", "up", "down"]
TOKENIZER_FILE = "tokenizer.json"
"""File name of a run's tokenizer."""
BYTES = 256
"""Ids of the byte tokenizer."""
TRAINED_IDS = 8192
"""Ids of a tokenizer that is trained, where the config does not say."""


class TokenizerConfig(Section):
    """The tokenizer."""

    kind: Literal["byte", "bpe", "wordpiece", "file"] = Field(
        default="byte", description="bytes, one trained on the text, or a tokenizer.json"
    )
    vocab: Count | None = Field(
        default=None, description="most ids of one that is trained; null for 8192"
    )
    path: str | None = Field(default=None, description="the tokenizer.json of kind file")
    lowercase: Flag = Field(default=False, description="train on, and read, lower-case text")

    @property
    def ids(self) -> int:
        """The ids that a model must have: known before any text is read."""
        if self.kind == "file":
            return count_ids(str(self.path))
        return BYTES if self.kind == "byte" else self.vocab or TRAINED_IDS

    @model_validator(mode="after")
    def _keys_belong_to_kinds(self) -> Self:
        trained = self.kind in ("bpe", "wordpiece")
        if (self.kind == "file") != (self.path is not None):
            raise ValueError(
                f"path is set when kind is file, and only then; got kind {self.kind} and path "
                f"{self.path}; {'set path' if self.path is None else 'set kind file'}"
            )
        if not trained and (self.vocab is not None or self.lowercase):
            raise ValueError(
                f"vocab and lowercase are of kind bpe and wordpiece; got kind {self.kind}, vocab "
                f"{self.vocab} and lowercase {self.lowercase}; remove them, or change kind"
            )
        return self


class SequenceConfig(BatchConfig):
    """Batches of sequences."""

    sequence_length: Count = Field(default=128, description="tokens that the model sees at once")

    @property
    def step_size(self) -> int:
        return self.batch_size * self.sequence_length

    @property
    def step_unit(self) -> str:
        return "tokens"


class DataConfig(SequenceConfig):
    """The text and its batches."""

    path: str | None = Field(
        default=None,
        description="a file, a folder, a glob pattern, or a Hugging Face dataset that "
        "save_to_disk wrote; null for the Python standard library",
    )
    mixture: dict[str, Positive] | None = Field(
        default=None,
        description="several paths, each with its weight, in place of path: of all batches "
        "together a text has the share that its weight is of all weights",
    )
    pattern: str = Field(
        default="**/*", description="which files of a folder to read, as a glob pattern"
    )
    format: Literal["auto", "text", "jsonl", "parquet", "dataset"] = Field(
        default="auto", description="of the files; auto goes by their names, text for others"
    )
    text_key: str = Field(
        default="text", description="the field that holds the text (jsonl, parquet, dataset)"
    )
    split: str = Field(default="train", description="the split of a dataset that has several")
    documents: Literal["file", "blank_line", "line"] = Field(
        default="file", description="what ends a document of a text file"
    )
    tokenizer: TokenizerConfig = Field(
        default_factory=TokenizerConfig, description="what turns text into ids"
    )
    cache_dir: str | None = Field(
        default=None, description="where tokens are kept; null for the user's cache folder"
    )
    max_bytes: Count | None = Field(
        default=None, description="read at most this many bytes of each text"
    )
    validation_fraction: Annotated[float, Strict(), Field(gt=0, lt=1)] = Field(
        default=0.1, description="the share of the text, at its end, that is kept for validation"
    )

    @property
    def texts(self) -> list[Self]:
        """The config of each text: those of a mixture, or this one."""
        if self.mixture is None:
            return [self]
        return [self.model_copy(update={"path": path, "mixture": None}) for path in self.mixture]

    @model_validator(mode="after")
    def _one_or_several_texts(self) -> Self:
        if self.mixture is not None and (self.path is not None or not self.mixture):
            raise ValueError(
                "mixture names the paths of texts in place of path; got "
                f"{len(self.mixture)} of them and path {self.path}; set path null and give some, "
                "or mixture null"
            )
        return self


def read_tokenizer(path: str | Path, key: str = "data.tokenizer.path") -> Tokenizer:
    """Reads a tokenizer.json."""
    path = Path(path)
    text = read_text(path, key, "give the tokenizer.json of a tokenizer")
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more precise
        raise RecipeError(
            f"{key}: expected {path} to be a tokenizer.json of the tokenizers library; got: "
            f"{error!s:.200}; give another file"
        ) from error


def count_ids(path: str | Path) -> int:
    """One more than the largest id of a tokenizer.json, added tokens included."""
    return largest_id(read_tokenizer(path)) + 1


def largest_id(tokenizer: Tokenizer) -> int:
    """The largest id that a tokenizer can give; -1 where it has none."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


class ResidualConfig(Section):
    """Weights of residual branches (unitscale models)."""

    scheme: Literal["fixed", "running_mean", "depth"] = Field(
        default="depth", description="how the weight tau of each residual branch is chosen"
    )
    tau: Positive | None = Field(
        default=None,
        description="the weight of every branch; needed by, and only read under, scheme fixed",
    )
    mult: Positive = Field(
        default=1.0, description="weight of all branches together (scheme depth)"
    )
    attention_ratio: Positive = Field(
        default=1.0, description="weight of attention branches over MLP branches (scheme depth)"
    )

    @model_validator(mode="after")
    def _tau_belongs_to_fixed(self) -> Self:
        if (self.scheme == "fixed") != (self.tau is not None):
            raise ValueError(
                "tau is set when scheme is fixed, and only then; "
                f"got scheme {self.scheme} and tau {self.tau}; "
                f"{'set tau, such as 0.5' if self.tau is None else 'remove tau'}"
            )
        return self


class TransformerConfig(Section):
    """The shape of a Transformer.

    Attributes:
      shared: Of keys that mean less in one of the libraries, the values that it has.
    """

    shared: ClassVar[dict[str, dict[str, tuple[Any, ...]]]] = {
        "plain": {
            "vocab_multiple": (1,),
            "attention_implementation": ("auto",),
            "scan": (False,),
            "remat": ("none",),
        },
        "unitscale": {},
    }

    library: Literal["unitscale", "plain"] = Field(
        default="unitscale",
        description="unitscale.nn, or the same model in plain flax.nnx as a baseline",
    )
    vocab: Count = Field(
        default=BYTES, description="number of token ids; null for those of data.tokenizer"
    )
    vocab_multiple: Count = Field(
        default=1,
        description="the embedding table and the readout are padded with zeros, which never learn, "
        "up to a multiple of this that matrix kernels like, such as 128",
    )
    width: Count = Field(default=128, description="size of the residual stream")
    layers: Count = Field(default=4, description="number of Transformer layers")
    heads: Count = Field(default=4, description="number of attention heads")
    mlp_ratio: Positive = Field(default=4.0, description="hidden size of the MLP over the width")
    context: Count | None = Field(
        default=None,
        description="the longest sequence, which learned positions are for; null for "
        "data.sequence_length",
    )
    positions: Positions = Field(
        default="learned",
        description="position encoding: rotations in attention (rope), or a table that is learned",
    )
    tied_readout: Flag = Field(default=False, description="use the embedding table as the readout")
    dropout: Fraction = Field(
        default=0.0, description="share of activations dropped in each branch"
    )
    residual: ResidualConfig = Field(default_factory=ResidualConfig, description="residual weights")
    attention_implementation: Literal["auto", "plain", "chunked", "cudnn", "splash"] = Field(
        default="auto",
        description="all attention weights at once, in chunks, or a fused kernel: cudnn of NVIDIA "
        "GPUs, splash of TPUs; auto: whichever fits (unitscale models)",
    )
    scan: Flag = Field(
        default=False,
        description="run the layers as one with stacked parameters, compiled once for all of them",
    )
    remat: Literal["none", "dots", "layer"] = Field(
        default="none",
        description="what of each layer the backward pass computes again, to save memory: nothing, "
        "all but its products, or all of it (unitscale models)",
    )

    @property
    def hidden(self) -> int:
        return round(self.width * self.mlp_ratio)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def stack_options(self) -> dict[str, Any]:
        """Options of `unitscale.nn.TransformerStack` that do not differ between recipes."""
        residual = self.residual
        return {
            "residual_scheme": residual.scheme,
            "residual_tau": 0.5 if residual.tau is None else residual.tau,
            "residual_mult": residual.mult,
            "residual_attention_ratio": residual.attention_ratio,
            "max_length": self.context,
            "rotary_base": 10000.0 if self.positions == "rope" else None,
            "dropout_rate": self.dropout,
            "remat": self.remat,
            "attention_implementation": self.attention_implementation,
            "scan": self.scan,
        }

    @model_validator(mode="after")
    def _library_has_keys(self) -> Self:
        for key, values in self.shared[self.library].items():
            if (own := getattr(self, key)) not in values:
                other = "unitscale" if self.library == "plain" else "plain"
                told = key if isinstance(own, Section) else f"{key} {json.dumps(own)}"
                meant = " or ".join(map(json.dumps, values))
                message = f"{told} needs library {other}; got library {self.library}; set {key} "
                raise ValueError((message + meant).replace('"', ""))
        return self

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.width % self.heads:
            raise ValueError(
                f"heads must divide width; got heads {self.heads} and width {self.width}; "
                f"use heads {_nearest_divisor(self.width, self.heads)}"
            )
        if self.hidden < 1:
            raise ValueError(
                "mlp_ratio * width must be at least 1; "
                f"got mlp_ratio {self.mlp_ratio} and width {self.width}; use a larger mlp_ratio"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(
                "rope needs an even head size (width / heads); "
                f"got width {self.width} and heads {self.heads}, a head size of {self.head_dim}; "
                "change heads, or use positions learned"
            )
        return self


class RopeConfig(Section):
    """Rotary position embedding."""

    base: Positive = Field(default=10000.0, description="what the wavelengths are powers of")
    scaling: Literal["none", "linear", "llama3", "yarn"] = Field(
        default="none",
        description="all frequencies over `factor` (linear), or those of long wavelengths (llama3, "
        "yarn)",
    )
    factor: Positive = Field(default=1.0, description="what frequencies are divided by")
    low_factor: Positive = Field(
        default=1.0, description="llama3: wavelengths past context over this are scaled wholly"
    )
    high_factor: Positive = Field(
        default=4.0, description="llama3: wavelengths below context over this are kept"
    )
    context: Count = Field(
        default=8192,
        description="llama3, yarn: the longest sequence before it was scaled",
    )
    fast: Positive = Field(
        default=32.0, description="yarn: frequencies that turn more often in context are kept"
    )
    slow: Positive = Field(
        default=1.0, description="yarn: those that turn less often are scaled wholly"
    )
    truncate: Flag = Field(
        default=True, description="yarn: the band between the two is of whole pairs of features"
    )
    attention_factor: Positive = Field(
        default=1.0, description="yarn: what rotated queries and keys are multiplied by"
    )

    @model_validator(mode="after")
    def _bands_have_a_width(self) -> Self:
        if self.scaling == "llama3" and self.high_factor <= self.low_factor:
            raise ValueError(
                "rope scaling llama3 needs a high_factor above its low_factor; got "
                f"{self.high_factor} and {self.low_factor}; correct them"
            )
        if self.scaling == "yarn" and (self.fast < self.slow or self.base <= 1):
            raise ValueError(
                "rope scaling yarn needs a beta_fast of at least its beta_slow, and a base above "
                f"1; got {self.fast}, {self.slow} and {self.base}; correct them"
            )
        return self


class DecoderConfig(Section):
    """A decoder of the Llama family, as read from its folder; the defaults are those of the GPT."""

    head_dim: Count | None = Field(
        default=None, description="features of a head; null for width over heads"
    )
    activation: Literal["silu", "gelu", "gelu_tanh"] = Field(
        default="silu", description="of the gate of a gated MLP"
    )
    biases: Annotated[tuple[Literal["qkv", "out", "mlp"], ...], Field(max_length=3)] = Field(
        default=(), description="which linear layers add one"
    )
    query_key_norms: Flag = Field(default=False, description="RMSNorm of each query and key")
    post_norms: Flag = Field(default=False, description="a norm after each branch as well")
    norm_offset: Flag = Field(default=False, description="RMSNorm multiplies by 1 + weight")
    embedding_scale: Flag = Field(
        default=False, description="multiply embeddings by the root of the width"
    )
    attention_scale: Positive | None = Field(
        default=None, description="what scores are multiplied by; null for 1 / sqrt(head_dim)"
    )
    attention_cap: Positive | None = Field(
        default=None, description="scores s become cap tanh(s / cap); null for none"
    )
    logit_cap: Positive | None = Field(default=None, description="the same of the logits")
    window: Count | None = Field(
        default=None, description="tokens that a local layer attends to, its own included"
    )
    local_layers: tuple[Whole, ...] = Field(
        default=(), description="layers that attend to the window only, counted from 0"
    )
    rope: RopeConfig = Field(default_factory=RopeConfig, description="rotary positions")
    local_rope: RopeConfig | None = Field(
        default=None, description="those of local layers; null for the same"
    )

    @model_validator(mode="after")
    def _local_layers_have_a_window(self) -> Self:
        if self.local_layers and self.window is None:
            raise ValueError(
                f"local layers need a window; got layers {list(self.local_layers)} and no window; "
                "set the window, or remove the layers"
            )
        return self


class GPTModelConfig(TransformerConfig):
    """The shape of the GPT."""

    shared: ClassVar[dict[str, dict[str, tuple[Any, ...]]]] = {
        "plain": TransformerConfig.shared["plain"]
        | {"remat": ("none", "layer"), "document_end": (None,)},
        "unitscale": {"norm_eps": (None,), "decoder": (None,)},
    }

    kv_heads: Count | None = Field(
        default=None,
        description="heads of keys and values (grouped-query attention); null for `heads`",
    )
    mlp: Literal["plain", "gated"] = Field(
        default="plain", description="gelu MLP, or gated silu MLP"
    )
    norm: Literal["rms", "layer"] = Field(default="rms", description="RMSNorm or LayerNorm")
    norm_eps: Positive | None = Field(default=None, description="of plain models; null: 1e-6")
    bias: Flag = Field(default=False, description="whether linear layers add a bias")
    positions: Positions = Field(default="rope", description="position encoding")
    document_end: Whole | None = Field(
        default=None,
        description="the id that ends a document, past which attention does not look back; null "
        "for one text without ends",
    )
    decoder: DecoderConfig | None = Field(
        default=None,
        description="what a plain model of the Llama family has beyond this; init fills it in",
        json_schema_extra={"from_init": True},
    )

    @property
    def variant(self) -> DecoderConfig:
        """`decoder`, or one that adds nothing."""
        return self.decoder or DecoderConfig()

    @property
    def head_dim(self) -> int:
        return self.variant.head_dim or self.width // self.heads

    @property
    def biases(self) -> tuple[str, ...]:
        """Linear layers of a plain model that add a bias."""
        return ("qkv", "out", "mlp") if self.bias else self.variant.biases

    @model_validator(mode="after")
    def _kv_heads_divide(self) -> Self:
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads must divide heads; got kv_heads {self.kv_heads} and heads {self.heads}; "
                f"use kv_heads {_nearest_divisor(self.heads, self.kv_heads)}"
            )
        return self


class LoraConfig(Section):
    """Low-rank updates of a decoder's linear layers."""

    rank: Count = Field(default=8, description="size between the two products of an update")
    alpha: Positive = Field(default=16.0, description="updates are multiplied by alpha / rank")
    targets: Annotated[tuple[Target, ...], Field(min_length=1)] = Field(
        default=("query", "value"), description="linear layers of attention and MLP to update"
    )
    init: str | None = Field(
        default=None, description="the folder of an adapter to start from; null for a new one"
    )

    @property
    def scale(self) -> float:
        """Factor of an update: alpha / rank."""
        return self.alpha / self.rank


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), -d))


_FREE = "dropout", "remat", "attention_implementation"
"""Keys of a model's section that do not change its weights."""


class LanguageConfig(RunConfig):
    """Config of a Transformer trained on text."""

    data: DataConfig = Field(default_factory=DataConfig, description="the text and its batches")
    model: TransformerConfig = Field(
        default_factory=TransformerConfig, description="the shape of the model"
    )
    init: str | None = Field(
        default=None, description="the folder of a run of this recipe to start from; null for none"
    )

    def passed_on(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The keys of a file whose `init` is this run, with its model and its tokenizer."""
        shape, own = self.model.model_dump(mode="json"), self.data.tokenizer
        if self.longest is None:
            del shape["context"]  # any length will do
        else:
            shape["context"] = self.longest
        tokenizer = {"kind": "byte"}
        if own.kind != "byte":
            folder = Path(self.train.runs_dir) / self.name
            tokenizer = {"kind": "file", "path": str(folder / TOKENIZER_FILE)}
        # The run has trained this tokenizer: its file takes the place of the keys.
        data = tree.get("data")
        if isinstance(data, dict) and _agrees(data.get("tokenizer"), own.model_dump(mode="json")):
            tree = tree | {"data": {key: data[key] for key in data if key != "tokenizer"}}
        return filled_from(tree, shape, tokenizer)

    @property
    def resumed(self) -> Self:
        return self.model_copy(update={"init": None})

    @property
    def context(self) -> int:
        """Number of positions that are learned, where they are."""
        return self.model.context or self.data.sequence_length

    @property
    def longest(self) -> int | None:
        return self.context if self.model.positions == "learned" else None

    @property
    def sequence(self) -> int:
        return self.data.sequence_length

    @field_validator("model", mode="before")
    @classmethod
    def _vocab_of_tokenizer(cls, model: Any, info: ValidationInfo) -> Any:
        """Fills in `vocab`, so that a run's config tells its model's shape by itself."""
        data = info.data.get("data")  # None where it is wrong itself
        given = model.model_dump(exclude_unset=True) if isinstance(model, BaseModel) else model
        if not isinstance(given, dict) or given.get("vocab") is not None:
            return model
        if data is None:  # of which there is a complaint already
            return {key: value for key, value in given.items() if key != "vocab"}
        return {**given, "vocab": data.tokenizer.ids}

    @model_validator(mode="after")
    def _model_fits_text(self) -> Self:
        tokenizer, context, length = (
            self.data.tokenizer,
            self.model.context,
            self.data.sequence_length,
        )
        # A file, which may have moved, is not asked: the run has a copy.
        if tokenizer.kind != "file" and self.model.vocab < tokenizer.ids:
            raise ValueError(
                f"model.vocab must be at least the {tokenizer.ids} ids of the {tokenizer.kind} "
                f"tokenizer; got {self.model.vocab}; set model.vocab null"
            )
        if context is not None and context < length:
            raise ValueError(
                f"model.context must be at least data.sequence_length; got {context} and {length}; "
                "lower data.sequence_length, or set model.context null unless init fixes it"
            )
        return self


def filled_from(
    tree: dict[str, Any], shape: dict[str, Any], tokenizer: dict[str, str]
) -> dict[str, Any]:
    """The keys of a file with the shape and the tokenizer of the model that its `init` names.

    Raises:
      RecipeError: The file has a model of another shape, or another kind of tokenizer.
    """
    init, data = tree["init"], tree.get("data") or {}
    model = tree.get("model") or {}
    if not isinstance(data, dict) or not isinstance(model, dict):
        return tree  # for the config to complain about
    for key, value in model.items():
        if key not in _FREE and key in shape and not _agrees(value, shape[key]):
            raise RecipeError(
                f"model.{key}: expected {shape[key]!r}, that of init {init}; got {value!r}; "
                "remove it"
            )
    given = data.get("tokenizer") or {}
    if isinstance(given, dict):
        kind = given.get("kind", tokenizer["kind"])
        if kind != tokenizer["kind"]:
            raise RecipeError(
                f"data.tokenizer.kind: expected {tokenizer['kind']}, the tokenizer that init "
                f"{init} was trained with; got {kind!r}; remove it"
            )
        given = tokenizer | given
    free = {key: model[key] for key in model if key in _FREE or key not in shape}
    return tree | {"model": shape | free, "data": data | {"tokenizer": given}}


def _agrees(given: Any, own: Any) -> bool:
    """Compare a value of a file with a run's; null and missing keys agree with anything."""
    if isinstance(given, dict) and isinstance(own, dict):
        return all(key in own and _agrees(given[key], own[key]) for key in given)
    return given is None or given == own
