"""Where a GPU spent its time, kernel by kernel, as JAX's profiler saw it."""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

SMALL = 3e-6  # seconds of a kernel that takes about as long to start as to run
FP8, WIDE, ATTENTION, TRANSPOSE = "FP8 products", "16-bit products", "attention", "transposes"
SMALL_KERNELS, OTHER = "small kernels", "other kernels"

# What cuBLAS and Triton call theirs: in nvjet's names the first letters are the operands' formats.
_PATTERNS = {
    ATTENTION: "cudnn|fmha|flash",
    FP8: r"nvjet_\w+?_[qr][qr]|e4m3|e5m2",
    WIDE: "nvjet|gemm|cutlass|xmma",
    TRANSPOSE: "transpose",
}
KINDS = (*_PATTERNS, SMALL_KERNELS, OTHER)


def kernel_times(work: Callable[[], Any]) -> list[tuple[str, float]]:
    """Names and seconds of the kernels that ran on GPUs while some work was done."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(work())
        return [
            (event.name, event.duration_ns / 1e9)
            for path in Path(folder).rglob("*.xplane.pb")
            for plane in ProfileData.from_file(str(path)).planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]


def kind_of(name: str, seconds: float) -> str:
    """What a kernel does, by its name.

    Example:
      >>> kind_of("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_TNT", 2e-5)
      'FP8 products'
    """
    for kind, pattern in _PATTERNS.items():
        if re.search(pattern, name):
            return kind
    return SMALL_KERNELS if seconds < SMALL else OTHER


def measured_kinds(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Columns of a table: measured milliseconds of each kind of kernels, and how many there are."""
    times, count = defaultdict(float), 0
    for name, seconds in kernels:
        times[kind_of(name, seconds)] += 1e3 * seconds
        count += 1
    if not count:
        return {}
    return {f"measured {kind} ms": times[kind] for kind in KINDS} | {"kernels run": count}
