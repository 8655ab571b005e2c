"""Reference arithmetic of formats: all values of a format in float64, and rounding to these.

It follows the definition of floating-point formats without using casts of ml_dtypes or XLA, as a
reference for both. (ml_dtypes rounds float64 to 8 bits twice.)
"""

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Layout:
    """The bits of a format, and the meaning of its largest exponent."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    # "ieee": the largest exponent is inf and NaN; "fn": only its largest mantissa is NaN;
    # "all": every code is a number (fnuz, FP6, FP4).
    top: str
    overflow: float  # what a value beyond the range becomes without saturation
    nan: float = np.nan

    @functools.cache  # noqa: B019 (the layouts are few and live as long as the tests)
    def values(self) -> np.ndarray:
        """All values that are not negative, ascending."""
        exponents = 2**self.exponent_bits - (self.top == "ieee")
        mantissas = 2**self.mantissa_bits
        numbers = [
            (m + (mantissas if e else 0)) * 2.0 ** (max(e, 1) - self.bias - self.mantissa_bits)
            for e in range(exponents)
            for m in range(mantissas)
        ]
        return np.array(numbers[:-1] if self.top == "fn" else numbers)


def ieee(exponent_bits: int, mantissa_bits: int) -> Layout:
    bias = 2 ** (exponent_bits - 1) - 1
    return Layout(exponent_bits, mantissa_bits, bias, "ieee", np.inf)


LAYOUTS = {
    "float8_e4m3fn": Layout(4, 3, 7, "fn", np.nan),
    "float8_e5m2": ieee(5, 2),
    "float8_e4m3fnuz": Layout(4, 3, 8, "all", np.nan),
    "float8_e5m2fnuz": Layout(5, 2, 16, "all", np.nan),
    "float8_e4m3b11fnuz": Layout(4, 3, 11, "all", np.nan),
    "float8_e4m3": ieee(4, 3),
    "float8_e3m4": ieee(3, 4),
    "float6_e2m3fn": Layout(2, 3, 1, "all", 7.5),
    "float6_e3m2fn": Layout(3, 2, 3, "all", 28.0),
    "float4_e2m1fn": Layout(2, 1, 1, "all", 6.0, nan=0.0),
    "float16": ieee(5, 10),
    "bfloat16": ieee(8, 7),
}


def neighbours(x: np.ndarray, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the grid values on both sides of each magnitude."""
    below = np.searchsorted(grid, x, "right") - 1
    return below, np.minimum(below + (grid[below] < x), len(grid) - 1)


def nearest(x: np.ndarray, layout: Layout, saturate: bool = True) -> np.ndarray:
    """Round float64 (or narrower) to the nearest value of a layout, ties to even codes."""
    x = np.asarray(x, np.float64)
    grid = layout.values()
    # One more value than the largest, as if the exponent went on: it decides what overflows.
    beyond = 2 * grid[-1] - grid[-2]
    extended = np.append(grid, beyond)
    magnitude = np.minimum(np.where(np.isnan(x), 0, np.abs(x)), beyond)
    below, above = neighbours(magnitude, extended)
    to_below, to_above = magnitude - extended[below], extended[above] - magnitude
    go_up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    rounded = extended[np.where(go_up, above, below)]
    overflow = rounded == beyond
    rounded = np.where(overflow, grid[-1] if saturate else layout.overflow, rounded)
    return np.where(np.isnan(x), layout.nan, np.copysign(rounded, x))


def probes(layout: Layout, dtype: type, seed: int = 0) -> np.ndarray:
    """Return values at which rounding changes, random bit patterns, and special values."""
    grid = layout.values()
    middle = (grid[1:] + grid[:-1]) / 2
    edge = [grid[-1] + (grid[-1] - grid[-2]) * k / 4 for k in range(1, 9)]
    points = np.concatenate([grid, middle, edge, [1e30, 1e-30]]).astype(dtype)
    points = np.concatenate([points, np.nextafter(points, dtype(np.inf)), np.nextafter(points, 0)])
    rng = np.random.default_rng(seed)
    size = np.dtype(dtype).itemsize
    bits = rng.integers(0, 256, 20_000 * size, np.uint8).view(f"u{size}").view(dtype)
    near = (rng.standard_normal(20_000) * np.exp2(rng.integers(-12, 12, 20_000))).astype(dtype)
    special = np.array([0, np.inf, np.nan, np.finfo(dtype).max, np.finfo(dtype).tiny], dtype)
    points = np.concatenate([points, bits, near, special])
    return np.concatenate([points, -points])
