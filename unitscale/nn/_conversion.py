"""What became of the layers of a model that was converted."""

import dataclasses

from ..quant import MatmulConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """What became of one layer.

    Attributes:
        path: dotted path of the layer.
        kind: its class.
        features: in and out; () for a convolution.
        rule: the pattern that matched it; "" if none did.
        config: the formats it got; None if it was left alone.
        reason: why it was left alone.

    Example:
        >>> layer = Conversion(
        ...     path="head", kind="Linear", features=(8, 8), rule="", config=None, reason="no rule"
        ... )
        >>> layer.features
        (8, 8)
    """

    path: str
    kind: str
    features: tuple[int, ...]
    rule: str
    config: MatmulConfig | None
    reason: str


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What `convert` did to each layer. Printed, it is a table.

    Attributes:
        layers: one entry for each layer with a product, in the order of their paths.

    Example:
        >>> from flax import nnx
        >>> from unitscale.nn import convert
        >>> model = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
        >>> convert(model, {"layers.0": "fp8_dynamic"}).converted
        ('layers.0',)
    """

    layers: tuple[Conversion, ...]

    @property
    def converted(self) -> tuple[str, ...]:
        """Paths of the layers that have quantized products now."""
        return tuple(layer.path for layer in self.layers if layer.config is not None)

    @property
    def skipped(self) -> dict[str, str]:
        """Paths of the other layers, and why."""
        return {layer.path: layer.reason for layer in self.layers if layer.config is None}

    def __str__(self) -> str:
        """A summary, then one row for each layer."""
        rows = [("layer", "class", "features", "formats, or why not", "rule")]
        for layer in self.layers:
            what = layer.reason if layer.config is None else _describe(layer.config)
            rows.append(
                (layer.path, layer.kind, "x".join(map(str, layer.features)), what, layer.rule)
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([f"{len(self.converted)} of {len(self.layers)} layers converted", *lines])


def _describe(config: MatmulConfig) -> str:
    names = [name.removeprefix("float8_") for name in (config.lhs, config.rhs, config.cotangent)]
    return f"{names[0]} x {names[1]}, cotangent {names[2]}, {config.strategy}"
