"""Which formats a quantized matrix product uses."""

import dataclasses
from typing import Any

from ..core import Format, format_of
from ._strategies import Strategy, Unit, check_strategy

_FP8_PAIRS = "E4M3 x E4M3, E4M3 x E5M2 and E5M2 x E4M3"


def _is_e5m2(fmt: Format) -> bool:
    return fmt.mantissa_bits == 2 and fmt.exponent_bits == 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulConfig:
    """Formats of the operands and cotangents of a matrix product, and how they are scaled.

    The forward product is lhs x rhs; the backward products are cotangent x rhs and lhs x
    cotangent. The operands are quantized once, and saved for the backward as they are multiplied.

    Attributes:
        lhs: format of the left operand (activations).
        rhs: format of the right operand (weights).
        cotangent: format of the output's cotangent, "float8_e5m2" for range or "float8_e4m3fn" for
            precision.
        strategy: how scales are chosen.
        dither: whether cotangents are rounded up or down by their own bits (`core.dithered`) before
            they are cast, so that the mean of many stays. It costs some integer operations.

    Raises:
        ValueError: if a format is unknown, or the formats would need a product that no hardware
            has (E5M2 x E5M2, or fnuz formats), or one has no negative numbers.
        TypeError: if the strategy is not one of this package.

    Example:
        >>> MatmulConfig().cotangent
        'float8_e4m3fn'

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433;
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, FP8 training.
    """

    lhs: str = "float8_e4m3fn"
    rhs: str = "float8_e4m3fn"
    cotangent: str = "float8_e4m3fn"
    strategy: Strategy = dataclasses.field(default_factory=Unit)
    dither: bool = False

    def __post_init__(self) -> None:
        check_strategy("MatmulConfig", self.strategy)
        formats = {name: self._format(name) for name in ("lhs", "rhs", "cotangent")}
        for left, right in (("lhs", "rhs"), ("cotangent", "rhs"), ("lhs", "cotangent")):
            if _is_e5m2(formats[left]) and _is_e5m2(formats[right]):
                raise ValueError(
                    f"unitscale.quant.MatmulConfig: {left} and {right} are both E5M2, which no "
                    f"matrix unit multiplies; supported pairs are {_FP8_PAIRS}"
                )
        for name, fmt in formats.items():
            if not fmt.signed:
                raise ValueError(
                    f"unitscale.quant.MatmulConfig: {name} is {fmt.name}, which has no negative "
                    f"numbers; supported pairs are {_FP8_PAIRS}"
                )
            if fmt.name.endswith("fnuz"):
                raise ValueError(
                    f"unitscale.quant.MatmulConfig: {name} is {fmt.name}, which XLA multiplies in "
                    f"no FP8 kernel of an NVIDIA GPU; supported pairs are {_FP8_PAIRS}, of "
                    "float8_e4m3fn and float8_e5m2"
                )

    def _format(self, name: str) -> Format:
        fmt: Any = format_of(getattr(self, name))
        object.__setattr__(self, name, fmt.name)
        return fmt
