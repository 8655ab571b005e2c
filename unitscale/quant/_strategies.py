"""How a scale is chosen when a tensor is quantized."""

import dataclasses
import math
from numbers import Real
from typing import Any, Literal, TypeAlias, TypeGuard, get_args

from ..core import format_of

Granularity = Literal["tensor", "channel"]
"""Which elements share a scale of `Dynamic`: all of a tensor, or all that a product sums over."""

Use = Literal["max", "latest"]
"""What a scale of `Delayed` is made of: the largest entry of its history, or the latest."""


def _fail(strategy: str, argument: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"unitscale.quant.{strategy}: {argument} must be {expected}; got {got!r}")


def _check_choice(strategy: str, argument: str, value: Any, kind: Any) -> None:
    if value not in get_args(kind):
        raise _fail(strategy, argument, f"one of {', '.join(get_args(kind))}", value)


def _check_count(strategy: str, argument: str, value: Any, least: int, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _fail(strategy, argument, expected, value)


def _is_scale(scale: Any) -> bool:
    if not isinstance(scale, Real) or not 2.0**-126 <= float(scale) <= 2.0**126:
        return False
    return math.frexp(scale)[0] == 0.5


def _check_margin(strategy: str, margin: Any) -> None:
    expected = "a whole number of powers of two, 0 or more (below 0 the largest value saturates)"
    _check_count(strategy, "margin", margin, 0, expected)


@dataclasses.dataclass(frozen=True)
class Unit:
    """No statistics at all: data is cast as it is, because unit scaling keeps it near RMS 1.

    Example:
        >>> Unit()
        Unit()
    """


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """Each scale from the tensor that it is for, at each step.

    Scaling:
        scale = 2**(k + margin) with the least k for which amax <= max * 2**k, max being the
        largest finite value of the format. An amax of zero, or one that is not finite, has scale 1.

    Attributes:
        granularity: "tensor", or "channel" for one scale per index of the dimensions that the
            product keeps (per row of activations, per output channel of weights). Channel scales
            multiply the result, so cotangents are quantized once for each of their two products.
        margin: powers of two left free above amax.

    Raises:
        ValueError: if the granularity is unknown or the margin negative.

    Example:
        >>> Dynamic("channel")
        Dynamic(granularity='channel', margin=0)

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433, section 3.
    """

    granularity: Granularity = "tensor"
    margin: int = 0

    def __post_init__(self) -> None:
        _check_choice("Dynamic", "granularity", self.granularity, Granularity)
        _check_margin("Dynamic", self.margin)


@dataclasses.dataclass(frozen=True)
class Delayed:
    """Each scale from the amax of earlier steps, so that a tensor is read once.

    Scaling:
        As `Dynamic`, with the largest (or latest) k of the last ``history`` steps. The scale is 1
        until the state has seen a step; `calibrate` starts it from data. A step in which a tensor
        is all zero or not finite leaves no entry.

    Attributes:
        history: number of optimizer steps remembered.
        margin: powers of two left free above amax.
        use: "max" of the history, or the "latest" entry.

    Raises:
        ValueError: if the history is shorter than 1, the margin negative or ``use`` unknown.

    Example:
        >>> Delayed(history=4)
        Delayed(history=4, margin=0, use='max')

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433, section 3.
    """

    history: int = 16
    margin: int = 0
    use: Use = "max"

    def __post_init__(self) -> None:
        _check_count("Delayed", "history", self.history, 1, "a whole number of steps, 1 or more")
        _check_margin("Delayed", self.margin)
        _check_choice("Delayed", "use", self.use, Use)


@dataclasses.dataclass(frozen=True)
class Static:
    """Scales that do not change with the data.

    Attributes:
        scales: one power of two for all three tensors of a product, or (lhs, rhs, cotangent). None
            if they are held in a `QuantState`, which `calibrate` fills and a monitor can move.
        margin: powers of two that `calibrate` leaves free above amax.

    Raises:
        ValueError: if a scale is no power of two of a normal float32, there are not 1 or 3, or the
            margin is negative.

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
        if len(scales) != 3 or not all(map(_is_scale, scales)):
            expected = "a power of two (2**-126 to 2**126), or (lhs, rhs, cotangent), or None"
            raise _fail("Static", "scales", expected, self.scales)
        object.__setattr__(self, "scales", tuple(float(s) for s in scales))


@dataclasses.dataclass(frozen=True)
class Block:
    """One dynamic scale for each block of elements that are summed over.

    ``Block(32)`` with E8M0 scales is MXFP8, except that scales are rounded up, so that the largest
    element of a block never saturates.

    Scaling:
        As `Dynamic`, for each block. Operands are saved in their format with their scales, and the
        backward multiplies what was saved.

    Attributes:
        size: elements of a block along each of its dimensions.
        dims: 1 for blocks along the last dimension that is summed over, 2 for square blocks that
            extend over the last kept dimension too.
        scale_format: "float8_e8m0fnu" or "float32"; the scales are powers of two in both.

    Raises:
        ValueError: if the size is not positive, or dims or the format is none of these.

    Example:
        >>> Block()
        Block(size=32, dims=1, scale_format='float8_e8m0fnu')

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
        if self.dims not in (1, 2):
            raise _fail("Block", "dims", "1 or 2", self.dims)
        name = format_of(self.scale_format).name
        if name not in ("float8_e8m0fnu", "float32"):
            raise _fail("Block", "scale_format", "float8_e8m0fnu or float32", self.scale_format)
        object.__setattr__(self, "scale_format", name)


Strategy: TypeAlias = Unit | Dynamic | Delayed | Static | Block
"""How a scale is chosen: one of the five strategies of `quantize` and `MatmulConfig`."""


def check_strategy(owner: str, strategy: Any) -> None:
    """Raises a TypeError that names ``owner`` if ``strategy`` is none of this package."""
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"unitscale.quant.{owner}: strategy must be Unit(), Dynamic(...), Delayed(...), "
            f"Static(...) or Block(...); got {strategy!r}"
        )


def is_stateful(strategy: Strategy) -> TypeGuard[Delayed | Static]:
    """Whether the scales of a strategy are held in a `QuantState`.

    Example:
        >>> is_stateful(Delayed()), is_stateful(Static(1.0)), is_stateful(Dynamic())
        (True, False, False)
    """
    return isinstance(strategy, Delayed) or (
        isinstance(strategy, Static) and strategy.scales is None
    )
