"""Signal-to-noise ratio of normally distributed values in a format, by their scale."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import Format, format_of
from ._trace_scales import extra

# Midpoints in units of the standard deviation, up to a tail that holds one value in 10^21. Their
# distance is irrational, so that they do not coincide with the numbers of any format.
_COUNT, _TAIL = 2**16, 3 * math.pi
_POINTS = (np.arange(_COUNT) + 0.5) * (_TAIL / _COUNT)
_WEIGHTS = np.exp(-(_POINTS**2) / 2) / math.sqrt(2 * math.pi) * (_TAIL / _COUNT)


def snr(format: Any, scales: Any, *, block: int | None = None) -> np.ndarray:
    """Return the signal-to-noise ratio of N(0, scale^2) rounded to a format, in decibels.

    Scaling:
        10 log10(E[x^2] / E[(x - round(x))^2]) for x from N(0, scale^2), rounded as by
        `unitscale.cast`: to nearest, saturating. With ``block`` the values of a block are first
        divided by the smallest power of two that brings them into range, as by `quant.Block`.

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
        raise ValueError(f"{name}: expected a format with a sign; got {fmt.name}")
    if block is not None and (not isinstance(block, int) or block < 1):
        raise ValueError(f"{name}: block must be a positive number of values; got {block!r}")
    sigma = np.asarray(scales, np.float64)
    if not (np.isfinite(sigma) & (sigma > 0)).all():
        raise ValueError(f"{name}: scales must be positive and finite; got {scales}")
    noise = [
        _noise(fmt, s)[0] if block is None else _block_noise(fmt, s, block) for s in sigma.flat
    ]
    return 10 * np.log10(sigma**2 / np.reshape(noise, sigma.shape))


def _noise(fmt: Format, sigma: float, limits: Any = (math.inf,)) -> np.ndarray:
    """Return E[(x - round(x))^2; |x| < limit] for x from N(0, sigma^2) and each limit."""
    x = sigma * _POINTS
    exponents = np.maximum(np.frexp(x)[1] - 1, fmt.min_exponent)
    spacing = np.ldexp(1.0, exponents - fmt.mantissa_bits)
    errors = x - np.minimum(np.rint(x / spacing) * spacing, fmt.max)
    ends = np.searchsorted(x, limits)
    return 2 * np.append(0.0, np.cumsum(_WEIGHTS * errors**2))[ends]


def _block_noise(fmt: Format, sigma: float, block: int) -> float:
    """Return E[(x - round(x))^2] for a value of a block with one scale."""
    total = 0.0
    limits = np.array([fmt.max / 2, fmt.max])
    top = math.ceil(math.log2(_TAIL * sigma / fmt.max))
    # The scale is 2^k if the largest magnitude of the block is in (2^k max / 2, 2^k max].
    for k in range(top - 24, top + 1):
        unit = sigma / 2.0**k
        others = [math.erf(limit / unit / math.sqrt(2)) ** (block - 1) for limit in limits]
        below_half, below = _noise(fmt, unit, limits) * others
        total += 4.0**k * (below - below_half)
    return total


# Label, format and block of the lines that `plot_snr` draws.
_NAMES = ("float32", "float16", "bfloat16", "e4m3fn", "e5m2", "e2m3", "e3m2", "e2m1")
LINES: tuple[tuple[str, Any, int | None], ...] = (
    *((name, name, None) for name in _NAMES),
    ("MXFP8 e4m3fn", "e4m3fn", 32),
    ("MXFP4 e2m1", "e2m1", 32),
)


def plot_snr(lines: Sequence[tuple[str, Any, int | None]] | None = None, scales: Any = None) -> Any:
    """Plot the signal-to-noise ratio of formats by scale (`snr`) in a `matplotlib.figure.Figure`.

    Args:
        lines: label, format and block (or None) of each line; by default the common formats of 32
            to 4 bits, and MX blocks of 32.
        scales: standard deviations; by default 2^-30 to 2^24.
    """
    figure = extra("plot_snr", "matplotlib.figure").Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    sigma = 2.0 ** np.linspace(-30, 24, 109) if scales is None else np.asarray(scales, np.float64)
    for index, (label, format, block) in enumerate(LINES if lines is None else lines):
        style = "-" if block is None else "--"
        values = snr(format, sigma, block=block)
        axes.plot(sigma, values, style, color=f"C{index % 10}", label=label)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="standard deviation", ylabel="signal to noise (dB)", ylim=(0, None))
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure
