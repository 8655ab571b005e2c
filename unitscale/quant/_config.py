"""Scaling strategies, and the formats of a quantized matmul with their presets."""

import dataclasses
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, Literal, TypeAlias

from ..core import check_choice, format_of


def _check(fits: bool, argument: str, expected: str, got: Any) -> None:
    if not fits:
        raise ValueError(f"unitscale.quant.{argument} must be {expected}; got {got!r}")


def _check_count(argument: str, got: Any, least: int, unit: str) -> None:
    fits = isinstance(got, int) and not isinstance(got, bool) and got >= least
    _check(fits, argument, f"a whole number of {unit}, {least} or more", got)


@dataclasses.dataclass(frozen=True)
class Unit:
    """Cast data without a scale, for data that unit scaling keeps near RMS 1."""


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """Compute each scale from the current amax (largest magnitude) of its tensor.

    Scaling:
        scale = 2**(k + margin) with the smallest k such that amax <= max * 2**k, where max is the
        largest finite value of the format. The scale is 1 if amax is zero or not finite.

    Attributes:
        granularity: "tensor" for one scale per tensor, or "channel" for one per row of activations
            and per output channel of weights, which multiply the matmul's result. With "channel"
            the cotangent is quantized separately for each backward matmul.
        margin: headroom to leave above amax, in powers of two.

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433, section 3.
    """

    granularity: Literal["tensor", "channel"] = "tensor"
    margin: int = 0

    def __post_init__(self) -> None:
        choices = ("tensor", "channel")
        check_choice("unitscale.quant.Dynamic", "granularity", self.granularity, choices)
        _check_count("Dynamic: margin", self.margin, 0, "powers of two")


@dataclasses.dataclass(frozen=True)
class Delayed:
    """Compute each scale from the amax of earlier steps, so that quantizing reads a tensor once.

    Scaling:
        As in `Dynamic`, with the largest (or latest) k of the last ``history`` steps. The scale is
        1 before the first step, unless `calibrate` sets it from data. Steps in which a tensor is
        all zero or not finite are not recorded.

    Attributes:
        history: number of optimizer steps to remember.
        margin: headroom to leave above amax, in powers of two.
        use: "max" for the largest entry of the history, or "latest".
    """

    history: int = 16
    margin: int = 0
    use: Literal["max", "latest"] = "max"

    def __post_init__(self) -> None:
        _check_count("Delayed: history", self.history, 1, "steps")
        _check_count("Delayed: margin", self.margin, 0, "powers of two")
        check_choice("unitscale.quant.Delayed", "use", self.use, ("max", "latest"))


@dataclasses.dataclass(frozen=True)
class Static:
    """Use scales that do not depend on the data.

    Attributes:
        scales: one power of two for all three tensors of a matmul, or (lhs, rhs, cotangent). None
            keeps them in a `QuantState`, where `calibrate` and a monitor can change them.
        margin: headroom that `calibrate` leaves above amax, in powers of two.
    """

    scales: Any = None
    margin: int = 0

    def __post_init__(self) -> None:
        _check_count("Static: margin", self.margin, 0, "powers of two")
        if self.scales is None:
            return
        scales = tuple(self.scales) if isinstance(self.scales, tuple | list) else (self.scales,) * 3
        fits = len(scales) == 3 and all(
            isinstance(s, Real) and 2.0**-126 <= float(s) <= 2.0**126 and math.frexp(s)[0] == 0.5
            for s in scales
        )
        expected = "a power of two (2**-126 to 2**126), or (lhs, rhs, cotangent), or None"
        _check(fits, "Static: scales", expected, self.scales)
        object.__setattr__(self, "scales", tuple(float(s) for s in scales))


@dataclasses.dataclass(frozen=True)
class Block:
    """Compute one dynamic scale for each block of elements along the summed dimension.

    ``Block(32)`` with E8M0 scales is MXFP8, except that scales are rounded up, so that the largest
    element of a block never saturates. ``Block(16, scale_format="e4m3fn")`` with data in E2M1 is
    NVFP4 without its scale per tensor, which unit-scaled data does not need.

    Scaling:
        As in `Dynamic`, for each block. Scales in E4M3 are amax / max, rounded to nearest, and at
        least 2**-9. With ``tensor_scale`` the scale of a block is t times a number in E4M3, where t
        is the smallest power of two, at least 2**-117, with amax <= 448 * max * t over the tensor
        (1.5 * amax if adaptive).

        Matmuls sum an operand over different dimensions forward and backward. With blocks in one
        dimension it is quantized for each matmul, as hardware requires; with square blocks once.

    Attributes:
        size: number of elements along each dimension of a block.
        dims: 1 for blocks along the last summed dimension; 2 for square blocks along the last
            summed and the last kept dimension; or one number for each of (lhs, rhs, cotangent).
        scale_format: "float8_e8m0fnu" or "float32" for powers of two, or "float8_e4m3fn".
        tensor_scale: whether scales in E4M3 also get one scale per tensor, for data far from RMS 1.
        adaptive: whether scales in E4M3 may be 1.5 times as large, so that the largest element of a
            block is 4 instead of 6 in E2M1; each block takes the scale with less squared error.

    References:
        NVIDIA, "Pretraining Large Language Models with NVFP4", 2025, arXiv 2509.25149, section 3;
        Cook et al., "Four Over Six", 2025, arXiv 2512.02010, section 3 (adaptive);
        Rouhani et al., "Microscaling Data Formats", 2023, arXiv 2310.10537, section 2;
        Mishra et al., "Recipes for Pre-training LLMs with MXFP8", 2025, arXiv 2506.08027
        (rounding scales up).
    """

    size: int = 32
    dims: int | tuple[int, int, int] = 1
    scale_format: str = "float8_e8m0fnu"
    tensor_scale: bool = False
    adaptive: bool = False

    def __post_init__(self) -> None:
        _check_count("Block: size", self.size, 1, "elements")
        dims = tuple(self.dims) if isinstance(self.dims, tuple | list) else (self.dims,) * 3
        fits = len(dims) == 3 and all(n in (1, 2) for n in dims)
        _check(fits, "Block: dims", "1, 2 or three of these, for (lhs, rhs, cotangent)", self.dims)
        name = format_of(self.scale_format).name
        choices = ("float8_e8m0fnu", "float8_e4m3fn", "float32")
        check_choice("unitscale.quant.Block", "scale_format", name, choices)
        for switch in ("tensor_scale", "adaptive"):
            fits = not getattr(self, switch) or name == "float8_e4m3fn"
            _check(fits, f"Block: {switch}", "False unless scale_format is 'float8_e4m3fn'", True)
        object.__setattr__(self, "dims", dims[0] if len(set(dims)) == 1 else dims)
        object.__setattr__(self, "scale_format", name)

    def of_operand(self, which: int) -> "Block":
        """Return the strategy of one of (lhs, rhs, cotangent)."""
        dims = self.dims if isinstance(self.dims, int) else self.dims[which]
        return dataclasses.replace(self, dims=dims)


Strategy: TypeAlias = Unit | Dynamic | Delayed | Static | Block
"""How a scale is chosen: one of the five strategies of `quantize` and `MatmulConfig`."""


def check_strategy(owner: str, strategy: Any) -> None:
    """Raise a TypeError that names ``owner`` unless ``strategy`` is a `Strategy`."""
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"unitscale.quant.{owner}: strategy must be Unit(), Dynamic(...), Delayed(...), "
            f"Static(...) or Block(...); got {strategy!r}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulConfig:
    """Formats of a matmul's operands and cotangent, and the strategy that scales them.

    The forward matmul is lhs x rhs; the backward matmuls are cotangent x rhs and lhs x cotangent.
    An operand is quantized once, and its quantized form is saved for the backward pass, except with
    blocks in one dimension, hadamard or wide_weight_gradient.

    Attributes:
        lhs: format of the left operand (activations).
        rhs: format of the right operand (weights).
        cotangent: format of the output's cotangent, "float8_e5m2" for range or "float8_e4m3fn" for
            precision.
        strategy: how scales are chosen.
        dither: whether to round cotangents with pseudo-random noise (`core.dithered`), which
            preserves the mean of many values.
        hadamard: whether to multiply groups of 16 tokens of both operands of the weight gradient by
            a random Hadamard matrix, which spreads outliers and cancels in the matmul. Needs
            `Block`.
        wide_weight_gradient: whether the weight gradient multiplies operands that are not
            quantized; the left one is then saved in its own dtype.
        accumulation: how FP8 kernels of Hopper GPUs add up. "fast" adds in about 14 bits of
            mantissa; "exact" moves partial sums to float32, which is slower; "fast_forward" is fast
            in the forward matmul and exact in the others, as in TransformerEngine and torchao. No
            effect on other devices.

    Raises:
        ValueError: if a format is unknown, unsigned or fnuz, or without `Block` lacks NaN (FP4 and
            FP6 would hide it), if two of them are E5M2, which no hardware multiplies, or if
            switches contradict each other.
    """

    lhs: str = "float8_e4m3fn"
    rhs: str = "float8_e4m3fn"
    cotangent: str = "float8_e4m3fn"
    strategy: Strategy = dataclasses.field(default_factory=Unit)
    dither: bool = False
    hadamard: bool = False
    wide_weight_gradient: bool = False
    accumulation: Literal["fast", "fast_forward", "exact"] = "fast"

    def __post_init__(self) -> None:
        check_strategy("MatmulConfig", self.strategy)
        fits = not self.hadamard or isinstance(self.strategy, Block)
        _check(fits, "MatmulConfig: hadamard", "False unless strategy is Block", True)
        fits = not (self.hadamard and self.wide_weight_gradient)
        _check(fits, "MatmulConfig: hadamard", "False with wide_weight_gradient", True)
        choices = ("fast", "fast_forward", "exact")
        check_choice("unitscale.quant.MatmulConfig", "accumulation", self.accumulation, choices)
        e5m2 = []
        for name in ("lhs", "rhs", "cotangent"):
            fmt = format_of(getattr(self, name))
            object.__setattr__(self, name, fmt.name)
            fits = fmt.signed and not fmt.name.endswith("fnuz")
            fits = fits and (fmt.has_nan or isinstance(self.strategy, Block))
            expected = "a signed format of NVIDIA GPUs, such as float8_e4m3fn (FP4 and FP6: Block)"
            _check(fits, f"MatmulConfig: {name}", expected, fmt.name)
            if (fmt.exponent_bits, fmt.mantissa_bits) == (5, 2):
                e5m2.append(name)
        if len(e5m2) > 1:
            raise ValueError(
                f"unitscale.quant.MatmulConfig: {' and '.join(e5m2)} are both E5M2, which no "
                "matrix unit multiplies; make one of them E4M3"
            )


def _nvfp4(**options: Any) -> MatmulConfig:
    block = Block(16, 1, "float8_e4m3fn", adaptive=True, **options)
    e2m1 = "float4_e2m1fn"
    return MatmulConfig(
        lhs=e2m1, rhs=e2m1, cotangent=e2m1, strategy=block, dither=True, hadamard=True
    )


PRESETS: Mapping[str, MatmulConfig] = {
    "fp8": MatmulConfig(),
    "fp8_e5m2": MatmulConfig(cotangent="float8_e5m2"),
    # Scales computed from amax leave small cotangents far below 1, so they need E5M2's range.
    "fp8_dynamic": MatmulConfig(cotangent="float8_e5m2", strategy=Dynamic()),
    "fp8_delayed": MatmulConfig(cotangent="float8_e5m2", strategy=Delayed()),
    "fp8_static": MatmulConfig(cotangent="float8_e5m2", strategy=Static()),
    # torchao's "rowwise_with_gw_hp".
    "fp8_channel": MatmulConfig(strategy=Dynamic("channel"), wide_weight_gradient=True),
    # DeepSeek-V3: 1 x 128 blocks of activations and cotangents, 128 x 128 blocks of weights.
    "fp8_block": MatmulConfig(strategy=Block(128, (1, 2, 1), "float32")),
    "mxfp8": MatmulConfig(strategy=Block()),
    "nvfp4": _nvfp4(),
    "nvfp4_dynamic": _nvfp4(tensor_scale=True),
}
"""`MatmulConfig`s by name, for policies of layers and for `nn.convert`."""
