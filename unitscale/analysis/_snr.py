"""The signal-to-noise ratio of normal values in a format, as a function of their scale.

A format keeps its relative precision over a band of scales, and loses values to zero below it and
to saturation above it. Where the band lies, and how wide it is, is what the choice of a scale is
about: unit scaling puts values in its middle.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import Format, format_of
from ._extras import extra

# Normal values beyond this many standard deviations are fewer than one in 10^23.
_TAIL = 10.0
# Finer grids are uniform between powers of two as far as a density can tell.
_CELLS = 8
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)


def snr(format: Any, scales: Any, *, block: int | None = None) -> np.ndarray:
    """Returns the signal-to-noise ratio of N(0, scale^2) rounded to a format, in decibels.

    Scaling:
        10 log10(E[x^2] / E[(x - round(x))^2]) with x ~ N(0, scale^2), rounding to the nearest,
        saturating, with subnormal numbers: what `unitscale.cast` does. The noise is integrated
        over the grid of the format, interval by interval. With ``block`` the values are divided
        first by the power of two that just brings the largest of so many values into range, as
        under `quant.Block`, whose expectation over independent blocks is exact as well.

    Args:
        format: a format, as `core.format_of` knows it: a dtype, a name such as "e4m3fn",
            "float6_e2m3fn" or "E3M4".
        scales: standard deviations, a number or an array.
        block: number of values that share a power-of-two scale; None for no scale.

    Returns:
        float64 array of the shape of ``scales``.

    Raises:
        ValueError: if the format is unknown or has no sign, a scale is not positive and finite, or
            the block is not positive.

    Example:
        >>> print(snr("e4m3fn", [2**-12, 1.0, 2**12]).round(1))
        [ 0.  31.5  0.8]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, figure of SNR by scale;
        Rouhani et al., "Microscaling Data Formats", 2023, arXiv 2310.10537 (blocks).
    """
    fmt = format_of(format)
    if not fmt.signed:
        raise ValueError(
            f"unitscale.analysis.snr: expected a format with a sign; got {fmt.name}, which holds "
            "scales. Give the format of the data."
        )
    if block is not None and (not isinstance(block, int) or block < 1):
        raise ValueError(
            f"unitscale.analysis.snr: block must be a positive number of values; got {block!r}"
        )
    sigma = np.asarray(scales, np.float64)
    if not (np.isfinite(sigma) & (sigma > 0)).all():
        raise ValueError(
            f"unitscale.analysis.snr: scales must be positive and finite; got {scales}"
        )
    noise = _noise if block is None else lambda f, s: _block_noise(f, s, block)
    ratios = [s * s / noise(fmt, s) for s in sigma.ravel().tolist()]
    return 10 * np.log10(np.reshape(ratios, sigma.shape))


def _density(x: np.ndarray) -> np.ndarray:
    return np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def _integral(f: Any, low: np.ndarray, high: np.ndarray, sigma: float) -> float:
    """Gauss-Legendre over many intervals, each cut where it is wide for the density."""
    parts = max(1, math.ceil(2 * float(np.max(high - low, initial=0.0)) / sigma))
    edges = np.linspace(low, high, parts + 1)
    low, high = edges[:-1, :, None], edges[1:, :, None]
    half = (high - low) / 2
    return float(np.sum(half * _WEIGHTS * f(low + half * (1 + _NODES))))


def _noise(fmt: Format, sigma: float, limit: float = math.inf) -> float:
    """E[(x - round(x))^2; |x| < limit] of x ~ N(0, sigma^2)."""
    end = min(_TAIL * sigma, limit)
    # Beyond 2**-60 of the scale lies nothing that could be seen, on a grid of binades downwards.
    lowest = max(fmt.min_exponent, math.floor(math.log2(sigma)) - 60)
    highest = math.floor(math.log2(fmt.max))
    binades = 2.0 ** np.arange(lowest, highest + 2)
    edges = np.concatenate([[0.0], binades])
    edges = np.append(edges[edges < fmt.max], fmt.max)
    total = 0.0
    for low, high in itertools.pairwise(edges.tolist()):
        if low >= end:
            break
        step = max(_step(fmt, low), fmt.smallest_subnormal)
        total += _between(low, min(high, end), step, sigma)
    if end > fmt.max:
        total += _integral(
            lambda x: (x - fmt.max) ** 2 * _density(x / sigma) / sigma,
            np.array([fmt.max]),
            np.array([end]),
            sigma,
        )
    return 2 * total


def _step(fmt: Format, low: float) -> float:
    return 2.0 ** (math.floor(math.log2(low)) - fmt.mantissa_bits) if low else 0.0


def _between(low: float, high: float, step: float, sigma: float) -> float:
    """Noise of one binade (or of the subnormal numbers), whose neighbours are ``step`` apart."""
    cells = math.ceil((high - low) / step)
    if cells > 2**_CELLS:
        # The square of the error averages to step^2 / 12 against a density that is smooth.
        edges = np.array([low]), np.array([high])
        mass = _integral(lambda x: _density(x / sigma) / sigma, *edges, sigma)
        return mass * step**2 / 12
    grid = low + step * np.arange(cells + 1)
    middle = (grid[:-1] + grid[1:]) / 2
    starts = np.concatenate([grid[:-1], middle])
    ends = np.minimum(np.concatenate([middle, grid[1:]]), high)
    nearest = np.concatenate([grid[:-1], grid[1:]])
    kept = starts < ends
    starts, ends, nearest = starts[kept], ends[kept], nearest[kept]
    return _integral(
        lambda x: (x - nearest[:, None]) ** 2 * _density(x / sigma) / sigma, starts, ends, sigma
    )


def _block_noise(fmt: Format, sigma: float, block: int) -> float:
    """The noise of one value of a block.

    Given that the largest magnitude lies in (t / 2, t], t = 2^k max, the scale is 2^k. The noise of
    a block of which all values are below t is that of one such value, times the probability of the
    others.
    """
    total = 0.0
    top = math.ceil(math.log2(_TAIL * sigma / fmt.max))
    for k in range(top - 64, top + 1):
        unit = sigma / 2.0**k
        above = _noise(fmt, unit, fmt.max) * _below(fmt.max / unit, block - 1)
        under = _noise(fmt, unit, fmt.max / 2) * _below(fmt.max / 2 / unit, block - 1)
        total += (above - under) * 4.0**k
    return total


def _below(deviations: float, count: int) -> float:
    return math.erf(deviations / math.sqrt(2)) ** count


LINES: tuple[tuple[str, Any, int | None], ...] = (
    ("FP32", "float32", None),
    ("FP16", "float16", None),
    ("BF16", "bfloat16", None),
    ("FP8 E4M3", "e4m3fn", None),
    ("FP8 E5M2", "e5m2", None),
    ("FP8 E4M3 fnuz", "e4m3fnuz", None),
    ("FP8 E5M2 fnuz", "e5m2fnuz", None),
    ("FP6 E2M3", "e2m3", None),
    ("FP6 E3M2", "e3m2", None),
    ("FP4 E2M1", "e2m1", None),
    ("MXFP8 E4M3", "e4m3fn", 32),
    ("MXFP4 E2M1", "e2m1", 32),
)
"""The lines of `plot_snr`: label, format, and size of a block."""


def plot_snr(lines: Sequence[tuple[str, Any, int | None]] | None = None, scales: Any = None) -> Any:
    """Draws the signal-to-noise ratio of formats by scale.

    Args:
        lines: label, format and block (or None) of each line, as for `snr`; by default FP32, FP16,
            BF16, the FP8, FP6 and FP4 formats, and MX blocks of 32.
        scales: standard deviations; by default 2^-30 to 2^24.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: as `snr`.

    Example:
        >>> figure = plot_snr([("FP8", "e4m3fn", None)], [0.5, 1.0, 2.0])
        >>> figure.axes[0].get_lines()[0].get_label()
        'FP8'

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, figure of SNR by scale.
    """
    figure = extra("plot_snr", "matplotlib.figure").Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    sigma = 2.0 ** np.linspace(-30, 24, 109) if scales is None else np.asarray(scales, np.float64)
    for index, (label, format, block) in enumerate(LINES if lines is None else lines):
        style = "-" if block is None else "--"
        color = f"C{index % 10}" if index < 10 else ("black", "grey")[index % 2]
        axes.plot(sigma, snr(format, sigma, block=block), style, color=color, label=label)
    axes.set_xscale("log", base=2)
    first, last = (round(math.log2(end)) for end in (sigma.min(), sigma.max()))
    step = max(1, (last - first) // 12)
    axes.set_xticks(2.0 ** np.arange(step * -(-first // step), last + 1, step))
    axes.set_ylim(0, None)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="standard deviation of the values", ylabel="signal to noise (dB)")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure
