"""The config of recipe bert."""

from typing import Any, ClassVar, Literal, Self

from pydantic import field_validator, model_validator

from ..config import (
    Count,
    DataConfig,
    FixedResidual,
    Flag,
    Fraction,
    LanguageConfig,
    Section,
    Share,
    TokenizerConfig,
    TransformerConfig,
)
from ..run.folder import earlier_run, with_kept_scan

Pairs = Literal["none", "next_sentence", "sentence_order"]
Pooling = Literal["cls", "mean"]

SPECIAL = 3
"""Number of special tokens in a sequence, [CLS] A [SEP] B [SEP]."""
SEGMENTS = 2
"""Number of segments in a sequence, A and B."""


class MaskingConfig(Section):
    """Choice of the tokens to predict."""

    share: Share = 0.15
    """Share of tokens to predict."""
    whole_words: Flag = False
    """Predict either all WordPiece tokens of a word or none."""


_TOKENIZER = {"kind": "wordpiece", "lowercase": True}


class BertDataConfig(DataConfig):
    """Text in pairs of segments, with tokens to predict."""

    tokenizer: TokenizerConfig = TokenizerConfig.model_validate(_TOKENIZER)
    """The tokenizer: WordPiece, or a file with BERT's special tokens."""
    pairs: Pairs = "none"
    """Also predict whether the second segment follows the first (next_sentence), or their order."""
    masking: MaskingConfig = MaskingConfig()
    """Choice of the tokens to predict."""

    @field_validator("tokenizer", mode="before")
    @classmethod
    def _own_default(cls, given: Any) -> Any:
        return _TOKENIZER | given if isinstance(given, dict) and "kind" not in given else given

    @property
    def predictions(self) -> int:
        """Number of tokens to predict in a sequence."""
        return max(1, round(self.masking.share * self.sequence_length))

    @model_validator(mode="after")
    def _words_and_specials(self) -> Self:
        if self.tokenizer.kind not in ("wordpiece", "file"):
            raise ValueError(f"tokenizer.kind must be wordpiece or file; got {self.tokenizer.kind}")
        if self.sequence_length < SPECIAL + 2:
            least, got = SPECIAL + 2, self.sequence_length
            raise ValueError(f"sequence_length must be at least {least}; got {got}")
        return self


class BertModelConfig(TransformerConfig):
    """The shape of the BERT."""

    plain: ClassVar[dict[str, tuple[Any, ...]]] = TransformerConfig.plain | {
        "norm_placement": ("pre",)
    }

    vocab: Count = 8192
    """Number of token ids; null for the number that data.tokenizer has."""
    width: Count = 256
    """Size of the residual stream."""
    norm_placement: Literal["post", "pre"] = "post"
    """LayerNorm after each residual sum, as in BERT, or at the start of each branch."""
    tied_readout: Flag = True
    """Use the embedding table as the readout."""
    dropout: Fraction = 0.1
    """Dropout rate of embeddings, attention weights and branches."""
    residual: FixedResidual = FixedResidual()
    """Weights of residual branches (unitscale models)."""


class BertConfig(LanguageConfig):
    """Config of a pretraining run."""

    constants: ClassVar[dict[str, Any]] = LanguageConfig.constants | {
        "data.masking.masked": 0.8,
        "data.masking.random": 0.1,
    }
    converts = False

    recipe: Literal["bert"]
    """Name of the recipe."""
    data: BertDataConfig = BertDataConfig()
    """The text and the tokens to predict."""
    model: BertModelConfig = BertModelConfig()
    """The shape of the model."""

    @classmethod
    def filled(cls, tree: dict[str, Any]) -> dict[str, Any]:
        init = tree.get("init")
        return earlier_run(init, cls).passed_on(tree) if isinstance(init, str) else tree

    @property
    def settled(self) -> Self:
        return with_kept_scan(self)

    @property
    def loss_unit(self) -> str:
        asked = self.data.pairs != "none"
        return "hidden token plus nats per pair" if asked else "hidden token"

    @model_validator(mode="after")
    def _plain_models_have_no_pairs(self) -> Self:
        if self.model.library == "plain" and self.data.pairs != "none":
            raise ValueError("data.pairs needs model.library unitscale; set data.pairs none")
        return self
