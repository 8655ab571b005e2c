"""Config of BERT's pretraining."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, Strict, model_validator

from ..config import (
    Count,
    DataConfig,
    Flag,
    Fraction,
    LanguageConfig,
    ResidualConfig,
    Section,
    TokenizerConfig,
    TransformerConfig,
)
from ..run.folder import earlier_run

Pairs = Literal["none", "next_sentence", "sentence_order"]
Pooling = Literal["cls", "mean"]
Share = Annotated[float, Strict(), Field(ge=0, le=1)]

SPECIAL = 3
"""Special tokens of a sequence: [CLS] A [SEP] B [SEP]."""
SEGMENTS = 2
"""Segments of a sequence, A and B."""


class MaskingConfig(Section):
    """Tokens to predict, and what the model sees in their place."""

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


class BertModelConfig(TransformerConfig):
    """The shape of the BERT."""

    shared: ClassVar[dict[str, dict[str, tuple[Any, ...]]]] = {
        "plain": TransformerConfig.shared["plain"] | {"norm_placement": ("pre",)},
        "unitscale": {},
    }

    vocab: Count = Field(
        default=8192, description="number of token ids; null for those of data.tokenizer"
    )
    width: Count = Field(default=256, description="size of the residual stream")
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


class BertConfig(LanguageConfig):
    """A whole config of a BERT's pretraining."""

    recipe: Literal["bert"] = Field(description="which recipe this config is of")
    data: BertDataConfig = Field(
        default_factory=BertDataConfig, description="the text and the tokens to predict"
    )
    model: BertModelConfig = Field(
        default_factory=BertModelConfig, description="the shape of the model"
    )

    @classmethod
    def filled(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """With the shape and the tokenizer of the run in `init`."""
        init = tree.get("init")
        return earlier_run(init, cls).passed_on(tree) if isinstance(init, str) else tree

    @property
    def loss_unit(self) -> str:
        asked = self.data.pairs != "none"
        return "hidden token plus nats per pair" if asked else "hidden token"

    @model_validator(mode="after")
    def _library_has_keys(self) -> Self:
        if self.model.library == "unitscale":
            return self
        policy = self.precision.policy
        if "fp8" in policy or self.optimizer.umup:
            raise ValueError(
                "policy in FP8 and optimizer.umup need model.library unitscale; got model.library "
                f"plain, policy {policy} and optimizer.umup {self.optimizer.umup}; use float32"
                ", bfloat16 or float16, and set optimizer.umup false"
            )
        if self.data.pairs != "none":
            raise ValueError(
                f"data.pairs {self.data.pairs} needs model.library unitscale; got model.library "
                "plain; set data.pairs none"
            )
        return self

    @model_validator(mode="after")
    def _no_scalify(self) -> Self:
        if self.precision.scalify or self.precision.matmuls:
            raise ValueError(
                "precision.scalify and precision.matmuls are for plain models of other recipes; "
                "set both null"
            )
        return self
