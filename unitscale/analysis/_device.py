"""What a GPU reaches: operations per second by format, and bytes per second."""

import dataclasses
from collections.abc import Mapping

FORMATS = ("f8", "16", "32", "32 exact", "64")
"""Formats of products: 8-bit; float16 and bfloat16; float32 as TF32; float32 itself; float64."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU for `roofline`: what its large kernels reach, which is less than the data sheet says.

    Attributes:
        name: of the GPU.
        flops: operations per second of matrix products, by format: "f8" (8-bit), "16" (float16 and
            bfloat16), "32" (float32 at JAX's default precision, which is TF32), "32 exact" (float32
            at precision "highest") and "64".
        attention: operations per second of fused attention in 16 bits.
        vector: simple operations of float32 per second outside of matrix products.
        bandwidth: bytes per second to and from its memory.
        link: bytes per second to other GPUs of the host, in one direction.
        start: seconds that the smallest kernel takes.
        source: where the figures are from.

    Raises:
        ValueError: if a format is unknown or lacking, or a figure is not positive.

    Example:
        >>> import dataclasses
        >>> half = dataclasses.replace(H200, name="half", bandwidth=H200.bandwidth / 2)
        >>> f"{half.bandwidth / 1e12:.2f} TB/s"
        '1.65 TB/s'
    """

    name: str
    flops: Mapping[str, float]
    attention: float
    vector: float
    bandwidth: float
    link: float
    start: float
    source: str

    def __post_init__(self) -> None:
        if set(self.flops) != set(FORMATS):
            raise ValueError(
                f"unitscale.analysis.Device: flops must have the formats {', '.join(FORMATS)}; got "
                f"{', '.join(map(str, self.flops)) or 'none'}"
            )
        others = ("attention", "vector", "bandwidth", "link", "start")
        figures = {**self.flops, **{name: getattr(self, name) for name in others}}
        if wrong := [name for name, figure in figures.items() if not figure > 0]:
            raise ValueError(
                f"unitscale.analysis.Device: {wrong[0]} must be positive; got {figures[wrong[0]]}"
            )


H200 = Device(
    name="NVIDIA H200",
    flops={"f8": 1.32e15, "16": 0.70e15, "32": 0.35e15, "32 exact": 0.05e15, "64": 0.05e15},
    attention=0.25e15,
    vector=0.80 * 33.5e12,
    bandwidth=3.3e12,
    link=0.80 * 450e9,
    start=1.2e-6,
    source=(
        "Measured by `python -m recipes bench gpu` on an H200, JAX 0.11.2: products of 8,192 x "
        "8,192 matrices of random numbers (1,312 and 689 TFLOP/s; the data sheet says 1,979 and "
        "990), attention of GPT-2 small and of a Llama of 1B, forward and backward (180 and 280), "
        "XLA's copy of 1 GB (3.3 TB/s of 4.8); the smallest kernel by JAX's profiler. Others: the "
        "data sheet's 495, 67 and 67 TFLOP/s, half of the last two where no operation is a "
        "multiplication with an addition, and 450 GB/s of NVLink in one direction, less 20 to 30%."
    ),
)
"""An H200 of 141 GB, the default of `roofline`."""
