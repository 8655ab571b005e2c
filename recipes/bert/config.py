"""What pretraining a BERT can be told, each key declared once, with its meaning beside it."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, Strict, ValidationInfo, field_validator, model_validator

from ..config import (
    Count,
    DataConfig,
    Flag,
    Fraction,
    Positive,
    ResidualConfig,
    RunConfig,
    Section,
    TokenizerConfig,
    check_context,
    check_vocab,
    with_vocab,
)

Pairs = Literal["none", "next_sentence", "sentence_order"]
Share = Annotated[float, Strict(), Field(ge=0, le=1)]

SPECIAL = 3
"""Special tokens of a sequence: [CLS] A [SEP] B [SEP]."""


class MaskingConfig(Section):
    """Which tokens are to be predicted, and what the model sees in their place."""

    share: Annotated[float, Strict(), Field(gt=0, lt=1)] = Field(
        default=0.15, description="the share of tokens that are predicted"
    )
    masked: Share = Field(default=0.8, description="of these, the share that becomes [MASK]")
    random: Share = Field(
        default=0.1, description="the share that becomes any token; the rest stays as it is"
    )
    whole_words: Flag = Field(
        default=False, description="predict all tokens of a word, or none (WordPiece's ##)"
    )

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.masked + self.random > 1:
            raise ValueError(
                "masked and random must not be more than 1 together; got "
                f"{self.masked} and {self.random}; lower one of them"
            )
        return self


class BertDataConfig(DataConfig):
    """Text in pairs of segments, with tokens to predict."""

    tokenizer: TokenizerConfig = Field(
        default_factory=lambda: TokenizerConfig(kind="wordpiece", lowercase=True),
        description="what turns text into ids: WordPiece, or one that has BERT's special tokens",
    )
    pairs: Pairs = Field(
        default="none",
        description="what is asked of the two segments of a sequence: nothing, whether the second "
        "follows the first in the text (next_sentence), or whether they were swapped "
        "(sentence_order)",
    )
    masking: MaskingConfig = Field(
        default_factory=MaskingConfig, description="the tokens to predict"
    )

    @property
    def predictions(self) -> int:
        """Tokens of a sequence that are predicted, the same number of each."""
        return max(1, round(self.masking.share * self.sequence_length))

    @model_validator(mode="after")
    def _words_and_specials(self) -> Self:
        if self.tokenizer.kind not in ("wordpiece", "file"):
            raise ValueError(
                "tokenizer.kind must be wordpiece or file, because BERT needs its special tokens; "
                f"got {self.tokenizer.kind}; set wordpiece"
            )
        if self.sequence_length < SPECIAL + 2:
            raise ValueError(
                f"sequence_length must be at least {SPECIAL + 2}, a token of each segment and "
                f"{SPECIAL} special tokens; got {self.sequence_length}; raise it"
            )
        return self


class BertModelConfig(Section):
    """The shape of the BERT."""

    vocab: Count = Field(
        default=8192, description="number of token ids; null for those of data.tokenizer"
    )
    width: Count = Field(default=256, description="size of the residual stream")
    layers: Count = Field(default=4, description="number of Transformer layers")
    heads: Count = Field(default=4, description="number of attention heads")
    mlp_ratio: Positive = Field(default=4.0, description="hidden size of the MLP over the width")
    context: Count | None = Field(
        default=None, description="number of positions; null for data.sequence_length"
    )
    norm_placement: Literal["post", "pre"] = Field(
        default="post", description="LayerNorm after each sum, as in BERT, or inside each branch"
    )
    tied_readout: Flag = Field(default=True, description="use the embedding table as the readout")
    dropout: Fraction = Field(
        default=0.1, description="share dropped of embeddings, attention weights and branches"
    )
    residual: ResidualConfig = Field(
        default_factory=lambda: ResidualConfig(scheme="fixed", tau=0.5),
        description="residual weights",
    )

    @property
    def hidden(self) -> int:
        return round(self.width * self.mlp_ratio)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.width % self.heads:
            raise ValueError(
                f"heads must divide width; got heads {self.heads} and width {self.width}; "
                "change one of them"
            )
        if self.hidden < 1:
            raise ValueError(
                "mlp_ratio * width must be at least 1; "
                f"got mlp_ratio {self.mlp_ratio} and width {self.width}; use a larger mlp_ratio"
            )
        return self


class BertConfig(RunConfig):
    """A whole config of a BERT's pretraining."""

    recipe: Literal["bert"] = Field(description="which recipe this config is of")
    data: BertDataConfig = Field(
        default_factory=BertDataConfig, description="the text and the tokens to predict"
    )
    model: BertModelConfig = Field(
        default_factory=BertModelConfig, description="the shape of the model"
    )

    @property
    def context(self) -> int:
        """Number of positions."""
        return self.model.context or self.data.sequence_length

    @property
    def longest(self) -> int | None:
        return self.context

    @property
    def loss_unit(self) -> str:
        asked = self.data.pairs != "none"
        return "hidden token plus nats per pair" if asked else "hidden token"

    @field_validator("model", mode="before")
    @classmethod
    def _vocab_of_tokenizer(cls, model: Any, info: ValidationInfo) -> Any:
        """Fills in `vocab`, so that a run's config tells its model's shape by itself."""
        return with_vocab(model, info.data.get("data"))

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        check_vocab(self.model.vocab, self.data.tokenizer)
        if self.scalify is not None:
            raise ValueError(
                "scalify is for plain models; this recipe has unitscale models only; set scalify "
                "null"
            )
        check_context(self.model.context, self.data.sequence_length)
        return self
