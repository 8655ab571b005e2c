"""Scaling strategies, formats of a quantized matmul, and their presets."""

import dataclasses
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, Literal, TypeAlias, TypeGuard, get_args

from .. import core
from ..core import format_of

Granularity = Literal["tensor", "channel"]
"""Which elements share a scale of `Dynamic`: a whole tensor, or one slice along the sum."""

Use = Literal["max", "latest"]
"""Which entry of its history a `Delayed` scale uses: the largest or the latest."""


def _fail(strategy: str, argument: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"unitscale.quant.{strategy}: {argument} must be {expected}; got {got!r}")


def _check_choice(strategy: str, argument: str, value: Any, choices: tuple[Any, ...]) -> None:
    core.check_choice(f"unitscale.quant.{strategy}", argument, value, choices)


def _check_count(strategy: str, argument: str, value: Any, least: int, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _fail(strategy, argument, expected, value)


def _check_margin(strategy: str, margin: Any) -> None:
    expected = "a whole number of powers of two, 0 or more (below 0 the largest value saturates)"
    _check_count(strategy, "margin", margin, 0, expected)


@dataclasses.dataclass(frozen=True)
class Unit:
    """Cast data without a scale: unit scaling keeps it near RMS 1."""


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """Compute each scale from the current amax of its own tensor.

    Scaling:
        scale = 2**(k + margin) with the least k for which amax <= max * 2**k, where max is the
        largest finite value of the format. The scale is 1 if amax is zero or not finite.

    Attributes:
        granularity: "tensor", or "channel" for one scale per index of the dimensions that the
            matmul keeps (per row of activations, per output channel of weights). Channel scales
            multiply the result, so the cotangent is quantized once for each backward matmul.
        margin: powers of two left free above amax.

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433, section 3.
    """

    granularity: Granularity = "tensor"
    margin: int = 0

    def __post_init__(self) -> None:
        _check_choice("Dynamic", "granularity", self.granularity, get_args(Granularity))
        _check_margin("Dynamic", self.margin)


@dataclasses.dataclass(frozen=True)
class Delayed:
    """Compute each scale from the amax history, so that quantizing reads a tensor once.

    Scaling:
        As `Dynamic`, with the largest (or latest) k of the last ``history`` steps. The scale is 1
        before the first step; `calibrate` sets it from data. A step in which a tensor is all zero
        or not finite adds no entry.

    Attributes:
        history: number of optimizer steps remembered.
        margin: powers of two left free above amax.
        use: "max" of the history, or the "latest" entry.

    References:
        As `Dynamic`.
    """

    history: int = 16
    margin: int = 0
    use: Use = "max"

    def __post_init__(self) -> None:
        _check_count("Delayed", "history", self.history, 1, "a whole number of steps, 1 or more")
        _check_margin("Delayed", self.margin)
        _check_choice("Delayed", "use", self.use, get_args(Use))


@dataclasses.dataclass(frozen=True)
class Static:
    """Use scales that do not depend on the data.

    Attributes:
        scales: one power of two for all three tensors of a matmul, or (lhs, rhs, cotangent). None
            to keep them in a `QuantState`, where `calibrate` and a monitor can change them.
        margin: powers of two that `calibrate` leaves free above amax.

    Example:
        >>> Static((1.0, 0.5, 2.0**-10)).scales
        (1.0, 0.5, 0.0009765625)
    """

    scales: Any = None
    margin: int = 0

    def __post_init__(self) -> None:
        _check_margin("Static", self.margin)
        if self.scales is None:
            return
        scales = tuple(self.scales) if isinstance(self.scales, tuple | list) else (self.scales,) * 3
        if len(scales) != 3 or not all(
            isinstance(s, Real) and 2.0**-126 <= float(s) <= 2.0**126 and math.frexp(s)[0] == 0.5
            for s in scales
        ):
            expected = "a power of two (2**-126 to 2**126), or (lhs, rhs, cotangent), or None"
            raise _fail("Static", "scales", expected, self.scales)
        object.__setattr__(self, "scales", tuple(float(s) for s in scales))


@dataclasses.dataclass(frozen=True)
class Block:
    """Compute one dynamic scale for each block of elements along the summed dimension.

    ``Block(32)`` with E8M0 scales is MXFP8, except that scales are rounded up, so that the largest
    element of a block never saturates.

    Scaling:
        As `Dynamic`, for each block. Operands are saved in their format with their scales, and the
        backward pass multiplies the saved values.

    Attributes:
        size: elements of a block along each of its dimensions.
        dims: 1 for blocks along the last summed dimension, 2 for square blocks that also extend
            along the last kept dimension.
        scale_format: "float8_e8m0fnu" or "float32"; scales are powers of two in both.

    References:
        Rouhani et al., "Microscaling Data Formats", 2023, arXiv 2310.10537, section 2;
        Mishra et al., "Recipes for Pre-training LLMs with MXFP8", 2025, arXiv 2506.08027
        (rounding scales up).
    """

    size: int = 32
    dims: int = 1
    scale_format: str = "float8_e8m0fnu"

    def __post_init__(self) -> None:
        _check_count("Block", "size", self.size, 1, "a whole number of elements, 1 or more")
        _check_choice("Block", "dims", self.dims, (1, 2))
        name = format_of(self.scale_format).name
        _check_choice("Block", "scale_format", name, ("float8_e8m0fnu", "float32"))
        object.__setattr__(self, "scale_format", name)


Strategy: TypeAlias = Unit | Dynamic | Delayed | Static | Block
"""How a scale is chosen: one of the five strategies of `quantize` and `MatmulConfig`."""


def check_strategy(owner: str, strategy: Any) -> None:
    """Raise a TypeError that names ``owner`` unless ``strategy`` is one of this package."""
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"unitscale.quant.{owner}: strategy must be Unit(), Dynamic(...), Delayed(...), "
            f"Static(...) or Block(...); got {strategy!r}"
        )


def is_stateful(strategy: Strategy) -> TypeGuard[Delayed | Static]:
    """Return whether a strategy keeps its scales in a `QuantState`."""
    return isinstance(strategy, Delayed) or (
        isinstance(strategy, Static) and strategy.scales is None
    )


_FP8_PAIRS = "E4M3 x E4M3, E4M3 x E5M2 and E5M2 x E4M3, of float8_e4m3fn and float8_e5m2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulConfig:
    """Formats of a matmul's operands and cotangent, and the strategy that scales them.

    The forward matmul is lhs x rhs; the backward ones are cotangent x rhs and lhs x cotangent.
    Operands are quantized once, and saved for the backward pass as they were multiplied.

    Attributes:
        lhs: format of the left operand (activations).
        rhs: format of the right operand (weights).
        cotangent: format of the output's cotangent, "float8_e5m2" for range or "float8_e4m3fn" for
            precision.
        strategy: how scales are chosen.
        dither: round cotangents up or down by noise made of their own bits (`core.dithered`)
            before they are cast, so that the mean of many values is kept.

    Raises:
        ValueError: if a format is unknown, unsigned or fnuz, or if a matmul would be E5M2 x E5M2,
            which no hardware has.
        TypeError: if the strategy is not one of this package.
    """

    lhs: str = "float8_e4m3fn"
    rhs: str = "float8_e4m3fn"
    cotangent: str = "float8_e4m3fn"
    strategy: Strategy = dataclasses.field(default_factory=Unit)
    dither: bool = False

    def __post_init__(self) -> None:
        check_strategy("MatmulConfig", self.strategy)
        e5m2 = []
        for name in ("lhs", "rhs", "cotangent"):
            fmt = format_of(getattr(self, name))
            object.__setattr__(self, name, fmt.name)
            problem = "has no negative numbers" if not fmt.signed else ""
            if fmt.name.endswith("fnuz"):
                problem = "no FP8 kernel of an NVIDIA GPU multiplies"
            if problem:
                raise ValueError(
                    f"unitscale.quant.MatmulConfig: {name} is {fmt.name}, which {problem}; "
                    f"supported pairs are {_FP8_PAIRS}"
                )
            if (fmt.exponent_bits, fmt.mantissa_bits) == (5, 2):
                e5m2.append(name)
        if len(e5m2) > 1:
            raise ValueError(
                f"unitscale.quant.MatmulConfig: {' and '.join(e5m2)} are both E5M2, which no "
                f"matrix unit multiplies; supported pairs are {_FP8_PAIRS}"
            )


PRESETS: Mapping[str, MatmulConfig] = {
    "fp8": MatmulConfig(),
    "fp8_e5m2": MatmulConfig(cotangent="float8_e5m2"),
    # Scales that follow amax leave small cotangents the range of E5M2.
    "fp8_dynamic": MatmulConfig(cotangent="float8_e5m2", strategy=Dynamic()),
    "fp8_delayed": MatmulConfig(cotangent="float8_e5m2", strategy=Delayed()),
    "fp8_static": MatmulConfig(cotangent="float8_e5m2", strategy=Static()),
    "mxfp8": MatmulConfig(strategy=Block()),
}
"""`MatmulConfig`s by name, the same in policies of layers and in converted models."""
