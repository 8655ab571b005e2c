"""The `optimizer` section of a config: update rule, learning rates and formats of its state."""

from typing import Annotated, Literal, Self

from pydantic import Field, Strict, model_validator

from .schema import Count, Flag, Fraction, NonNegative, Positive, Section, Whole

WeightFormat = Literal["float32", "bfloat16", "float16"]
StateFormat = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
VECTOR = 0.03  # of gains and biases


class MultipliersConfig(Section):
    """What learning rates are multiplied by, beside u-muP's factors, by the role of a parameter.

    u-muP's factor of a gain or a bias is 1: at the rate that is best for weights, each update is
    larger than the gain itself. Gains then reach a hundred, activations leave unit size with them,
    and after some thousand steps 8 bits do not hold them (u-muP's authors train no gains).
    """

    weight: NonNegative = Field(default=1.0, description="matrices of dense layers")
    readout: NonNegative = Field(default=1.0, description="the matrix of an untied readout")
    embedding: NonNegative = Field(default=1.0, description="tables of tokens and positions")
    bias: NonNegative = Field(default=VECTOR, description="biases of dense layers")
    norm: NonNegative = Field(default=VECTOR, description="gains and biases of norms")


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adam", "adamw", "sgd", "lion", "muon"] = Field(
        default="adamw",
        description="the update rule; muon is Adam for all but hidden kernels, and 1/32 as large",
    )
    learning_rate: Positive = Field(default=2e-3, description="the peak learning rate")
    warmup_steps: Whole = Field(default=0, description="steps of linear warm-up from 0")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="how the learning rate falls after the warm-up"
    )
    final_fraction: Annotated[float, Strict(), Field(ge=0, le=1)] = Field(
        default=0.1, description="the last learning rate over the peak (cosine and linear)"
    )
    b1: Fraction = Field(default=0.9, description="decay of the first moment; momentum of sgd")
    b2: Fraction = Field(default=0.95, description="decay of the second moment")
    eps: NonNegative | None = Field(
        default=None,
        description="added to the root of the second moment by Adam; null: 2^-12 with umup, whose "
        "gradients are of size 1, else 1e-8",
    )
    weight_decay: NonNegative = Field(
        default=0.0,
        description="decoupled weight decay (not of adam, sgd); with umup, the share each step "
        "removes",
    )
    clip_norm: Positive | None = Field(
        default=None, description="largest global norm of the gradient"
    )
    skip_nonfinite: Whole = Field(
        default=0, description="steps in a row left out where loss or gradient is not finite"
    )
    loss_scale: Positive | Literal["dynamic"] | None = Field(
        default=None,
        description="what the loss is multiplied by while it is differentiated, for comparison: a "
        "number, or dynamic for one that halves where a gradient is not finite; null for none",
    )
    loss_scale_interval: Count = Field(
        default=2000, description="finite steps in a row after which a dynamic scale doubles"
    )
    weights: WeightFormat | None = Field(
        default=None,
        description="format that weights are kept in, with a scale; null keeps float32",
    )
    moments: Annotated[list[StateFormat], Field(min_length=2, max_length=2)] | None = Field(
        default=None,
        description="formats of the first and second moment, with scales; null keeps float32",
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest", description="how weights and moments are rounded into their formats"
    )
    min_size: Whole = Field(
        default=0,
        description="parameters and moments of fewer entries, those of a stack of layers together, "
        "stay in float32: gains and biases are few bytes, and each ten small kernels on a GPU",
    )
    umup: Flag = Field(
        default=True, description="u-muP learning rates by each parameter's role, fan-in and depth"
    )
    multipliers: MultipliersConfig = Field(
        default_factory=MultipliersConfig, description="with umup, further factors by role"
    )

    @property
    def scaled(self) -> bool:
        """Whether weights or moments are kept in formats of their own."""
        return self.weights is not None or self.moments is not None

    @property
    def adam_eps(self) -> float:
        """What Adam adds to the root of the second moment.

        Gradients of unit-scaled models begin at size 1, far above those of a mean loss. Beside them
        1e-8 is nothing: parameters whose gradients only shrink, such as the readout's columns of
        tokens that never occur, would take whole steps until 16 bits lose these.
        """
        if self.eps is not None:
            return self.eps
        return 2.0**-12 if self.umup else 1e-8

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if self.loss_scale == "dynamic" and self.skip_nonfinite:
            raise ValueError(
                "loss_scale dynamic leaves out steps that are not finite itself; got "
                f"skip_nonfinite {self.skip_nonfinite}; set it 0"
            )
        if self.rounding != "nearest" and not self.scaled:
            raise ValueError(
                "rounding stochastic needs weights or moments; got null for both; set them, or "
                "rounding nearest"
            )
        own = MultipliersConfig()
        changed = [
            role for role, factor in self.multipliers if factor not in (1, getattr(own, role))
        ]
        if not self.umup and changed:
            raise ValueError(
                "multipliers need umup true, which knows the roles of parameters; got umup false; "
                f"set {', '.join(f'multipliers.{role}' for role in changed)} to 1, or umup true"
            )
        if self.name == "muon" and not self.umup:
            raise ValueError(
                "name muon needs umup true, which knows hidden kernels from other matrices; got "
                "umup false; set umup true, or another name"
            )
        if self.weight_decay and self.name in ("adam", "sgd"):
            raise ValueError(
                f"weight_decay needs name adamw, lion or muon; got name {self.name} and "
                f"weight_decay {self.weight_decay}; set name adamw or weight_decay 0"
            )
        return self
