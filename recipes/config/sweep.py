"""The `sweep` section of a config: a grid of runs, each at its own best learning rate."""

from typing import Annotated, Any

from pydantic import Field, Strict

from .schema import Count, Section, Whole


class SweepConfig(Section):
    """The grid, and how learning rates are searched at each of its points."""

    grid: dict[str, list[Any]] = Field(
        default_factory=dict, description="lists of values of dotted keys, such as model.kind"
    )
    seeds: list[Whole] = Field(default=[0], min_length=1, description="seeds to average over")
    factor: Annotated[float, Strict(), Field(gt=1)] = Field(
        default=4.0, description="ratio of neighbouring learning rates"
    )
    rates: Annotated[int, Strict(), Field(ge=3)] = Field(
        default=5, description="learning rates trained at once"
    )
    rounds: Count = Field(
        default=3, description="how often the rates are extended until the best is inside"
    )
    when: dict[str, dict[str, Any] | None] = Field(
        default_factory=dict,
        description="further values of dotted keys, for the points of which words such as "
        "`model.library=plain optimizer.name=sgd` all hold; null leaves such points out; "
        "optimizer.learning_rate is where the search of a point starts",
    )
