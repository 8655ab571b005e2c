"""The `lora` section of a config: low-rank updates of a decoder whose own weights stay frozen."""

from typing import Annotated, Literal

from pydantic import Field

from .schema import Count, Positive, Section

Target = Literal["query", "key", "value", "out", "gate", "up", "down"]


class LoraConfig(Section):
    """Which layers are updated, by products of which rank."""

    rank: Count = Field(default=8, description="size between the two products of an update")
    alpha: Positive = Field(default=16.0, description="updates are multiplied by alpha / rank")
    targets: Annotated[tuple[Target, ...], Field(min_length=1)] = Field(
        default=("query", "value"), description="linear layers of attention and MLP to update"
    )
    base: Literal["float8_e4m3fn", "float8_e5m2"] | None = Field(
        default=None,
        description="format that the frozen linear layers are kept in, with a power-of-two scale "
        "for each output; null for the policy's",
    )
    init: str | None = Field(
        default=None, description="the folder of an adapter to start from; null for a new one"
    )

    @property
    def scale(self) -> float:
        """What the product of an update is multiplied by."""
        return self.alpha / self.rank
