"""Configs of runs on text: tokenizer, batches, and the shapes of Transformers."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator
from tokenizers import Tokenizer

from ..errors import RecipeError, read_text
from .run import BatchConfig, Count, Flag, Fraction, Positive, RunConfig, Section, Share, Whole

Library = Literal["unitscale", "plain"]
Positions = Literal["rope", "learned"]
Target = Literal["query", "key", "value", "out", "gate", "up", "down"]
TOKENIZER_FILE = "tokenizer.json"
"""File name of a run's tokenizer."""
BYTES = 256
"""Number of ids of the byte tokenizer."""


class TokenizerConfig(Section):
    """The tokenizer."""

    kind: Literal["byte", "bpe", "wordpiece", "file"] = "byte"
    """Bytes, a tokenizer trained on the text (bpe, wordpiece), or a tokenizer.json (file)."""
    vocab: Count | None = None
    """Largest number of ids of a tokenizer trained on the text; null for 8192."""
    path: str | None = None
    """Path of the tokenizer.json (file)."""
    lowercase: Flag = False
    """Lowercase all text (bpe, wordpiece)."""

    @property
    def ids(self) -> int:
        """The number of ids that a model needs; no text has to be read for it."""
        if self.kind == "file":
            return largest_id(read_tokenizer(str(self.path))) + 1
        return BYTES if self.kind == "byte" else self.vocab or 8192

    @model_validator(mode="after")
    def _keys_belong_to_kinds(self) -> Self:
        if (self.kind == "file") != (self.path is not None):
            raise ValueError(f"kind file needs path, and others none; got {self.kind}, {self.path}")
        if self.kind in ("byte", "file") and (self.vocab is not None or self.lowercase):
            what = f"vocab and lowercase need kind bpe or wordpiece; got {self.kind}"
            raise ValueError(f"{what}; set vocab null and lowercase false")
        return self


class SequenceConfig(BatchConfig):
    """Batches of sequences."""

    step_unit = "tokens"

    sequence_length: Count = 128
    """Tokens of a sequence."""

    @property
    def step_size(self) -> int:
        return self.batch_size * self.sequence_length


class DataConfig(SequenceConfig):
    """The text and its batches."""

    path: str | None = None
    """File, folder, glob pattern or saved Hugging Face dataset; null for Python's library."""
    mixture: dict[str, Positive] | None = None
    """Several texts instead of path: a mapping from each path to its share of the windows."""
    pattern: str = "**/*"
    """Glob pattern of the files in a folder."""
    format: Literal["auto", "text", "jsonl", "parquet", "dataset"] = "auto"
    """Format of the files; auto decides by each file's name, and uses text by default."""
    text_key: str = "text"
    """Field or column that holds the text (jsonl, parquet, dataset)."""
    split: str = "train"
    """Split of a dataset that has several."""
    documents: Literal["file", "blank_line", "line"] = "file"
    """Where a document ends in a text file: at the end of the file, a blank line or any line."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer."""
    cache_dir: str | None = None
    """Folder for cached tokens; null for the user's cache folder."""
    max_bytes: Count | None = None
    """Read at most this many bytes of each text."""
    validation_fraction: Share = 0.1
    """Share of the text, at its end, to keep for validation."""

    @property
    def texts(self) -> list[Self]:
        """One config for each text of the mixture, or this config."""
        if self.mixture is None:
            return [self]
        return [self.model_copy(update={"path": path, "mixture": None}) for path in self.mixture]

    @model_validator(mode="after")
    def _one_or_several_texts(self) -> Self:
        if self.mixture is not None and (self.path is not None or not self.mixture):
            raise ValueError("mixture needs an entry, and path null; set either path or mixture")
        return self


def read_tokenizer(path: str | Path, key: str = "data.tokenizer.path") -> Tokenizer:
    """Read a tokenizer.json."""
    text = read_text(Path(path), key, "give the tokenizer.json of a tokenizer")
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more precise
        what = f"{key}: expected {path} to be a tokenizer.json of the tokenizers library"
        raise RecipeError(f"{what}; got: {error!s:.200}") from error


def largest_id(tokenizer: Tokenizer) -> int:
    """Return the largest id of a tokenizer, or -1 if it has none."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


class ResidualConfig(Section):
    """Weights of residual branches (unitscale models)."""

    scheme: Literal["fixed", "running_mean", "depth"] = "depth"
    """Rule for the weight tau of each residual branch."""
    tau: Positive = 0.5
    """Weight of every branch (scheme fixed)."""
    mult: Positive = 1.0
    """Weight of all branches together relative to the embedding (scheme depth)."""
    attention_ratio: Positive = 1.0
    """Weight of attention branches relative to MLP branches (scheme depth, or recipe charlm)."""


class FixedResidual(ResidualConfig):
    """Weights of residual branches, by default the same for all."""

    scheme: Literal["fixed", "running_mean", "depth"] = "fixed"
    """Rule for the weight tau of each residual branch."""


class TransformerConfig(Section):
    """The shape of a Transformer."""

    plain: ClassVar[dict[str, tuple[Any, ...]]] = {
        "vocab_multiple": (1,),
        "attention_implementation": ("auto",),
        "scan": (False, "auto"),
        "remat": ("none",),
    }
    """Values that plain models support, by key."""

    library: Library = "unitscale"
    """Library of the model: unitscale.nn, or plain flax.nnx as a baseline."""
    vocab: Count = BYTES
    """Number of token ids; null for the number that data.tokenizer has."""
    vocab_multiple: Count = 1
    """Pad vocabulary dimensions to a multiple of this; 128 suits GPU kernels."""
    width: Count = 128
    """Size of the residual stream."""
    layers: Count = 4
    """Number of Transformer layers."""
    heads: Count = 4
    """Number of attention heads."""
    mlp_ratio: Positive = 4.0
    """Hidden size of the MLP as a multiple of the width."""
    context: Count | None = None
    """Length of the longest sequence; null for data.sequence_length."""
    positions: Positions = "learned"
    """Position encoding: rotary (rope) or a learned table."""
    tied_readout: Flag = False
    """Use the embedding table as the readout."""
    dropout: Fraction = 0.0
    """Dropout rate."""
    residual: ResidualConfig = ResidualConfig()
    """Weights of residual branches (unitscale models)."""
    attention_implementation: Literal["auto", "plain", "chunked", "cudnn", "splash"] = "auto"
    """Attention with all scores in memory (plain), in chunks, or in a GPU or TPU kernel."""
    scan: Flag | Literal["auto"] = "auto"
    """Stack the layers' parameters and scan over them; auto as in nn.TransformerStack."""
    remat: Literal["none", "dots", "quantized", "layer"] = "none"
    """Recompute whole layers, or all but matmul outputs (dots) or FP8 operands (quantized)."""

    @property
    def hidden(self) -> int:
        return max(1, round(self.width * self.mlp_ratio))

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def stack_options(self) -> dict[str, Any]:
        """Options of `unitscale.nn.TransformerStack` that every recipe sets the same way."""
        return {
            **{f"residual_{key}": value for key, value in self.residual},
            "max_length": self.context,
            "rotary_base": 10000.0 if self.positions == "rope" else None,
            "dropout_rate": self.dropout,
            "remat": self.remat,
            "attention_implementation": self.attention_implementation,
            "scan": self.scan,
        }

    @model_validator(mode="after")
    def _shape_fits(self) -> Self:
        width, heads, kv_heads = self.width, self.heads, getattr(self, "kv_heads", None)
        if width % heads:
            raise ValueError(f"heads must divide width; got heads {heads} and width {width}")
        if heads % (kv_heads or heads):
            raise ValueError(f"kv_heads must divide heads; got kv_heads {kv_heads}, heads {heads}")
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"rope needs an even head size (width / heads); got {self.head_dim}")
        for key, values in self.plain.items():
            if self.library == "plain" and getattr(self, key) not in values:
                raise ValueError(f"{key} {getattr(self, key)} needs library unitscale; got plain")
        return self


class RopeConfig(Section):
    """Rotary positions, as read from a Hugging Face folder."""

    base: Positive = 10000.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: Positive = 1.0  # divides frequencies: all (linear), or low ones (llama3, yarn)
    low_factor: Positive = 1.0  # llama3: wavelengths above context / low_factor are scaled
    high_factor: Positive = 4.0  # llama3: wavelengths below context / high_factor are kept
    context: Count = 8192  # llama3, yarn: the longest sequence before scaling
    fast: Positive = 32.0  # yarn: keep frequencies with more rotations than this in context
    slow: Positive = 1.0  # yarn: scale frequencies with fewer rotations than this
    truncate: Flag = True  # yarn: round the ends of the band between the two to whole pairs
    attention_factor: Positive = 1.0  # yarn: multiplies rotated queries and keys

    @model_validator(mode="after")
    def _bands_are_in_order(self) -> Self:
        high, low = self.high_factor, self.low_factor
        if self.scaling == "llama3" and high <= low:
            raise ValueError(f"rope: high_factor must be above low_factor; got {high} and {low}")
        if self.scaling == "yarn" and (self.fast < self.slow or self.base <= 1):
            got = f"got {self.fast}, {self.slow} and {self.base}"
            raise ValueError(f"rope: beta_fast must be at least beta_slow, the base above 1; {got}")
        return self


class DecoderConfig(Section):
    """Properties of Hugging Face decoders for which `model` has no keys."""

    norm_eps: Positive | None = None  # None: 1e-6
    head_dim: Count | None = None  # None: width / heads
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"  # in gated MLPs
    biases: Annotated[tuple[Literal["qkv", "out", "mlp"], ...], Field(max_length=3)] = ()
    query_key_norms: Flag = False
    post_norms: Flag = False  # a norm after each branch as well
    norm_offset: Flag = False  # RMSNorm multiplies by 1 + weight
    embedding_scale: Flag = False  # embeddings are multiplied by sqrt(width)
    attention_scale: Positive | None = None  # of scores; None: 1 / sqrt(head_dim)
    attention_cap: Positive | None = None  # scores s become cap tanh(s / cap)
    logit_cap: Positive | None = None
    window: Count | None = None  # tokens that a token of a local layer attends to, with itself
    local_layers: tuple[Whole, ...] = ()  # indices of layers with windowed attention
    rope: RopeConfig = RopeConfig()
    local_rope: RopeConfig | None = None  # of local layers; None: as `rope`
    fp8: Flag = False  # weights of linear layers are in FP8, with scales

    @model_validator(mode="after")
    def _local_layers_have_a_window(self) -> Self:
        if self.local_layers and self.window is None:
            raise ValueError(f"local layers need a window; got layers {list(self.local_layers)}")
        return self


class GPTModelConfig(TransformerConfig):
    """The shape of the GPT."""

    plain: ClassVar[dict[str, tuple[Any, ...]]] = TransformerConfig.plain | {
        "remat": ("none", "layer"),
        "document_end": (None,),
        "window": (None,),
    }

    kv_heads: Count | None = None
    """Number of key and value heads (grouped-query attention); null for heads."""
    mlp: Literal["plain", "gated"] = "plain"
    """MLP with gelu (plain), or with a silu gate (gated)."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm."""
    bias: Flag = False
    """Add biases in linear layers."""
    positions: Positions = "rope"
    """Position encoding: rotary (rope) or a learned table."""
    document_end: Whole | None = None
    """Token id that ends a document, to mask attention between documents; null for no mask."""
    window: Count | None = None
    """Number of tokens that a token attends to, itself included; null for all up to itself."""
    decoder: DecoderConfig | None = Field(default=None, json_schema_extra={"from_init": True})
    """Properties of a Hugging Face decoder, read from init."""

    @property
    def variant(self) -> DecoderConfig:
        """`decoder`, or its default."""
        return self.decoder or DecoderConfig()

    @property
    def head_dim(self) -> int:
        return self.variant.head_dim or self.width // self.heads

    @property
    def biases(self) -> tuple[str, ...]:
        """Linear layers of a plain model that have a bias."""
        return ("qkv", "out", "mlp") if self.bias else self.variant.biases


class LoraConfig(Section):
    """Low-rank updates of a decoder's linear layers."""

    rank: Count = 8
    """Rank of the updates."""
    alpha: Positive = 16.0
    """Updates are multiplied by alpha / rank."""
    targets: Annotated[tuple[Target, ...], Field(min_length=1)] = ("query", "value")
    """Linear layers of attention and MLP to update."""
    init: str | None = None
    """Folder of an adapter to start from; null for a new one."""

    @property
    def scale(self) -> float:
        """The factor alpha / rank of an update."""
        return self.alpha / self.rank


class LanguageConfig(RunConfig):
    """Config of a Transformer trained on text."""

    constants: ClassVar[dict[str, Any]] = {"model.residual.tau": None}

    data: DataConfig = DataConfig()
    """The text and its batches."""
    model: TransformerConfig = TransformerConfig()
    """The shape of the model."""
    init: str | None = None
    """Folder of a run of this recipe to start from; null for none."""

    @classmethod
    def upgraded(cls, tree: Any) -> Any:
        tree = super().upgraded(tree)
        if isinstance(model := tree.get("model"), dict):
            model.setdefault("scan", False)  # the only way before there was a choice
        return tree

    def passed_on(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Fill in the model and tokenizer of a config file whose `init` names this run."""
        shape = self.model.model_dump(mode="json", exclude={"context"})
        if self.longest is not None:
            shape["context"] = self.longest
        if self.data.tokenizer.kind == "byte":
            return filled_from(tree, shape, {"kind": "byte"})
        path = Path(self.train.runs_dir) / self.name / TOKENIZER_FILE
        tokenizer = {"kind": "file", "path": str(path)}
        return filled_from(tree, shape, tokenizer, self.data.tokenizer.model_dump(mode="json"))

    @property
    def resumed(self) -> Self:
        return self.model_copy(update={"init": None})

    def continued_by(self, folder: Path) -> str:
        return f"init={folder}"

    @property
    def context(self) -> int:
        """Length of the longest sequence; the number of positions if they are learned."""
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
        """Fill in `vocab`, so that the stored config has the complete shape."""
        given = model.model_dump(exclude_unset=True) if isinstance(model, BaseModel) else model
        if not isinstance(given, dict) or given.get("vocab") is not None:
            return model
        data = info.data.get("data")  # None if that section is invalid
        return given | {"vocab": data.tokenizer.ids if data else BYTES}

    @model_validator(mode="after")
    def _model_fits_text(self) -> Self:
        tokenizer, context, length = self.data.tokenizer, self.model.context, self.sequence
        # A tokenizer file is not read, as it may have moved after the run copied it.
        if tokenizer.kind != "file" and self.model.vocab < tokenizer.ids:
            least, got = tokenizer.ids, self.model.vocab
            raise ValueError(f"model.vocab must be at least the tokenizer's {least}; got {got}")
        if context is not None and context < length:
            got = f"got {context} and {length}"
            raise ValueError(f"model.context must be at least data.sequence_length; {got}")
        return self


def filled_from(
    tree: dict[str, Any], shape: dict[str, Any], tokenizer: Any, trained: Any = None
) -> dict[str, Any]:
    """Fill in model and tokenizer from `init`; raise an error if the file sets them differently."""
    model, data = tree.get("model") or {}, tree.get("data") or {}
    if not isinstance(data, dict) or not isinstance(model, dict):
        return tree  # validation will report it
    free = {"dropout", "remat", "attention_implementation"}  # may differ: they change no weights
    own = {key: model[key] for key in model if key in free or key not in shape}
    given = {f"model.{key}": (model[key], shape[key]) for key in model.keys() - own.keys()}
    if not _agrees(data.get("tokenizer"), trained):  # the file may repeat how it was trained
        given["data.tokenizer"] = data.get("tokenizer"), tokenizer
    for key, (value, wanted) in sorted(given.items()):
        if not _agrees(value, wanted):
            what = f"{key}: expected {wanted!r}, as in init {tree['init']}"
            raise RecipeError(f"{what}; got {value!r}; remove it")
    return tree | {"model": shape | own, "data": data | {"tokenizer": tokenizer}}


def _agrees(given: Any, own: Any) -> bool:
    """Return True if the file's value is null or equals the run's; compare the file's keys only."""
    if isinstance(given, dict) and isinstance(own, dict):
        return all(key in own and _agrees(given[key], own[key]) for key in given)
    return given is None or given == own
