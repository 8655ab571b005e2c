"""The signal-to-noise ratio of normal values in a format, as a function of their scale."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import Format, format_of
from ._trace_scales import extra

_TAIL = 10.0  # standard deviations beyond which there is less than one normal value in 10^23
_CELLS = 256  # of a binade, from which on the density is constant within a cell
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)


def snr(format: Any, scales: Any, *, block: int | None = None) -> np.ndarray:
    """Return the signal-to-noise ratio of N(0, scale^2) rounded to a format, in decibels.

    Scaling:
        10 log10(E[x^2] / E[(x - round(x))^2]) with x ~ N(0, scale^2), rounded as by
        `unitscale.cast`: to nearest, saturating. With ``block`` the values are first divided by the
        smallest power of two that brings the largest of so many into range, as by `quant.Block`.

    Args:
        format: a dtype, or a name such as "e4m3fn", "float6_e2m3fn" or "E3M4".
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
    name = "unitscale.analysis.snr"
    if not fmt.signed:
        raise ValueError(
            f"{name}: expected a format with a sign; got {fmt.name}, which holds scales. Give the "
            "format of the data."
        )
    if block is not None and (not isinstance(block, int) or block < 1):
        raise ValueError(f"{name}: block must be a positive number of values; got {block!r}")
    sigma = np.asarray(scales, np.float64)
    if not (np.isfinite(sigma) & (sigma > 0)).all():
        raise ValueError(f"{name}: scales must be positive and finite; got {scales}")
    noise = [_noise(fmt, s) if block is None else _block_noise(fmt, s, block) for s in sigma.flat]
    return 10 * np.log10(sigma**2 / np.reshape(noise, sigma.shape))


def _integral(f: Any, low: np.ndarray, high: np.ndarray, sigma: float) -> float:
    """Integrate f times the density of N(0, sigma^2) over many intervals."""
    parts = max(1, math.ceil(2 * float(np.max(high - low, initial=0.0)) / sigma))
    edges = np.linspace(low, high, parts + 1)
    half = ((edges[1:] - edges[:-1]) / 2)[..., None]
    x = edges[:-1, :, None] + half * (1 + _NODES)
    density = np.exp(-((x / sigma) ** 2) / 2) / (math.sqrt(2 * math.pi) * sigma)
    return float(np.sum(half * _WEIGHTS * f(x) * density))


def _noise(fmt: Format, sigma: float, limit: float = math.inf) -> float:
    """E[(x - round(x))^2; |x| < limit] of x ~ N(0, sigma^2)."""
    end = min(_TAIL * sigma, limit)
    lowest = max(fmt.min_exponent, math.floor(math.log2(sigma)) - 60)
    exponents = range(lowest, math.floor(math.log2(fmt.max)) + 1)
    edges = [0.0, *(2.0**e for e in exponents if 2.0**e < fmt.max), fmt.max]
    total = 0.0
    for low, top in itertools.pairwise(edges):
        high = min(top, end)
        if low >= high:
            break
        spacing = 2.0 ** (math.floor(math.log2(low)) - fmt.mantissa_bits) if low else 0.0
        step = max(spacing, fmt.smallest_subnormal)
        cells = math.ceil((high - low) / step)
        if cells > _CELLS:  # errors are uniform within a cell: their mean square is step^2 / 12
            ends = np.array([low]), np.array([high])
            total += step**2 / 12 * _integral(np.ones_like, *ends, sigma)
            continue
        half_cells = np.arange(2 * cells)
        starts = low + step / 2 * half_cells
        nearest = (low + step * ((half_cells + 1) // 2))[starts < high, None]
        starts = starts[starts < high]
        ends = np.minimum(starts + step / 2, high)
        total += _integral(lambda x, nearest=nearest: (x - nearest) ** 2, starts, ends, sigma)
    if end > fmt.max:
        ends = np.array([fmt.max]), np.array([end])
        total += _integral(lambda x: (x - fmt.max) ** 2, *ends, sigma)
    return 2 * total


def _block_noise(fmt: Format, sigma: float, block: int) -> float:
    """E[(x - round(x))^2] of a value of a block with one scale."""

    # The scale is 2^k if the largest magnitude lies in (t / 2, t] with t = 2^k max.
    def below(limit: float, unit: float) -> float:
        """Noise if the whole block is below the limit, times the probability of that."""
        others = math.erf(limit / unit / math.sqrt(2)) ** (block - 1)
        return _noise(fmt, unit, limit) * others

    top = math.ceil(math.log2(_TAIL * sigma / fmt.max))
    units = ((4.0**k, sigma / 2.0**k) for k in range(top - 64, top + 1))
    return sum(f * (below(fmt.max, unit) - below(fmt.max / 2, unit)) for f, unit in units)


# Label, format and block of the lines that `plot_snr` draws.
_NAMES = ("float32", "float16", "bfloat16", "e4m3fn", "e5m2", "e2m3", "e3m2", "e2m1")
LINES: tuple[tuple[str, Any, int | None], ...] = (
    *((name, name, None) for name in _NAMES),
    ("MXFP8 e4m3fn", "e4m3fn", 32),
    ("MXFP4 e2m1", "e2m1", 32),
)


def plot_snr(lines: Sequence[tuple[str, Any, int | None]] | None = None, scales: Any = None) -> Any:
    """Draw the signal-to-noise ratio of formats by scale, as `snr` computes it.

    Args:
        lines: label, format and block (or None) of each line; by default the common formats of 32
            to 4 bits, and MX blocks of 32.
        scales: standard deviations; by default 2^-30 to 2^24.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    figure = extra("plot_snr", "matplotlib.figure").Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    sigma = 2.0 ** np.linspace(-30, 24, 109) if scales is None else np.asarray(scales, np.float64)
    for index, (label, format, block) in enumerate(LINES if lines is None else lines):
        style = "-" if block is None else "--"
        values = snr(format, sigma, block=block)
        axes.plot(sigma, values, style, color=f"C{index % 10}", label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, None)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="standard deviation of the values", ylabel="signal to noise (dB)")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure
