"""How well unit scaling holds at initialisation: the RMS of every tensor, by depth and width.

    python -m recipes bench scales

One loss and gradient per shape, on tokens drawn independently and uniformly from a vocabulary much
larger than a sequence, which is what the rules assume of data; the last row is real text, whose
bytes repeat. Every other assumption (independence inside the model) is left as it is, and a tensor
outside the range asked for is named. What attention gives is much the same at all positions, so
that the sample behind its RMS is nearer to batch x width numbers than to tokens x width: take no
small batch.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx
from pydantic import ValidationError

from unitscale import nn

from ..gpt.config import GPTConfig
from ..gpt.task import build
from ..registry import wrong_values
from ..run.batch import loss_inputs
from ..run.probe import probe
from ..run.recipe import recipe_of
from ._figure import draw, readings
from ._numbers import numbers
from ._table import JsonPath, Table, publish, within

BETWEEN_BLOCKS, DENSE = (0.5, 2.0), (0.8, 1.25)
DEPTHS, WIDTHS = "4,8,16,32", "64,128,256,512,1024,2048"
VOCAB, HEAD = 4096, 32

STREAM, STREAM_GRADIENT = "between blocks", "gradients between blocks"
DENSE_OUTPUT, LOGITS = "Dense outputs", "logits"
OTHER, OTHER_GRADIENT = "other outputs", "gradients inside blocks"
WEIGHT, WEIGHT_GRADIENT = "weights", "weight gradients"
KINDS: dict[str, tuple[float, float] | None] = {
    STREAM: BETWEEN_BLOCKS,
    STREAM_GRADIENT: BETWEEN_BLOCKS,
    DENSE_OUTPUT: DENSE,
    OTHER: None,
    OTHER_GRADIENT: None,
    LOGITS: None,
    WEIGHT: None,
    WEIGHT_GRADIENT: None,
}
"""What a model's tensors are sorted into, and the range asked of their RMS, if any."""

Values = dict[str, dict[str, float]]
"""The RMS of tensors of a model by kind and path."""


def main(
    depths: Annotated[str, typer.Option(help="numbers of layers, at the second width")] = DEPTHS,
    widths: Annotated[str, typer.Option(help="widths, at the first depth")] = WIDTHS,
    batch: Annotated[int, typer.Option(min=1, help="sequences")] = 16,
    length: Annotated[int, typer.Option(min=2, help="tokens of each sequence")] = 128,
    data: Annotated[str | None, typer.Option(help="real text; by default Python's library")] = None,
    policy: Annotated[
        str, typer.Option(help="formats: float32, bfloat16, float16, fp8")
    ] = "float32",
    figure: Annotated[
        Path | None, typer.Option(help="also plot the text's, beside plain flax.nnx, to this file")
    ] = None,
    json: JsonPath = None,
) -> None:
    """Prints the RMS of activations, weights and gradients at initialisation."""
    layers, sizes = numbers("--depths", depths, int), numbers("--widths", widths, int)
    usual = sizes[min(1, len(sizes) - 1)]
    shapes = [(depth, usual) for depth in layers]
    shapes += [(layers[0], width) for width in sizes if width != usual]
    if len(layers) > 1:
        shapes.append((layers[-1], sizes[0]))

    def config_of(depth: int, width: int, vocab: int) -> GPTConfig:
        shape = {"layers": depth, "width": width, "heads": max(1, width // HEAD), "vocab": vocab}
        source = {"path": data, "sequence_length": length, "batch_size": batch}
        tree = {"name": "scales", "policy": policy, "model": shape, "data": source}
        try:
            return GPTConfig.model_validate(tree)
        except ValidationError as error:
            raise wrong_values(error, GPTConfig, f"{depth} layers of width {width}: ") from error

    tokens = np.random.default_rng(0).integers(0, VOCAB, (batch, length + 1)).astype(np.int32)
    runs = [(config_of(*shape, VOCAB), "random", tokens) for shape in dict.fromkeys(shapes)]
    text = config_of(layers[0], usual, 256)
    windows = next(recipe_of(text).load_data(text).validation(1))
    runs.append((text, "text", windows))
    if figure is not None:
        shape = f"{layers[0]} layers of {usual}, on {batch} x {length} bytes of text"
        draw(figure, readings(text, windows), f"A GPT before its first step: {shape}")
    found: dict[str, Values] = {}
    for config, kind, ids in runs:
        label = f"{config.model.layers} x {config.model.width} {kind}"
        found[label] = measure(config, ids)
        jax.clear_caches()  # each shape is compiled once, and large ones hold much memory
    notes = [
        f"{batch} sequences of {length} tokens, heads of {HEAD}; random: independent uniform "
        f"tokens of a vocabulary of {VOCAB}; text: bytes.",
        "logits are meant to have RMS width^-1/2 (u-muP's readout).",
    ]
    publish("scales", [summary(found), by_shape(found), outside(found)], json, notes)


def measure(config: GPTConfig, tokens: np.ndarray) -> Values:
    """The RMS of every tensor of a config's model on int32 windows (batch, time + 1)."""
    model = build(config)
    reading = probe(model, *loss_inputs(tokens))
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    found: Values = {kind: {} for kind in KINDS}
    for path, value in reading.activations.items():
        module = modules[path.rstrip("'")]
        stream = isinstance(module, (nn.Embed, nn.PositionalEmbed, nn.TransformerLayer))
        if isinstance(module, nn.Dense):
            kind = DENSE_OUTPUT
        elif isinstance(module, nn.Readout):
            kind = LOGITS
        else:
            kind = STREAM if stream else OTHER
        found[kind][path] = float(value)
        gradients = STREAM_GRADIENT if stream else OTHER_GRADIENT
        found[gradients][path] = float(reading.gradients[path])
    found[WEIGHT_GRADIENT] = {path: float(value) for path, value in reading.weights.items()}
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = ".".join(map(str, path))
        found[WEIGHT][name] = float(jnp.sqrt(jnp.mean(jnp.square(leaf.get_value()))))
    return found


def summary(found: Mapping[str, Values]) -> Table:
    """Every kind of tensor over all shapes."""
    rows = []
    for kind, bounds in KINDS.items():
        values = [
            (value, f"{label}: {path}")
            for label, tensors in found.items()
            for path, value in tensors[kind].items()
        ]
        (least, low), (greatest, high) = min(values), max(values)
        row: dict[str, Any] = {"tensors": kind}
        row |= {"least": least, "at": low, "greatest": greatest, "at ": high}
        if bounds:
            row["asked"] = "{} to {}".format(*bounds)
            row["within"] = within(least, bounds) and within(greatest, bounds)
        rows.append(row)
    return Table("RMS at initialisation, over all shapes", rows)


def by_shape(found: Mapping[str, Values]) -> Table:
    """Every shape, all kinds."""
    rows = [
        {"layers x width": label} | {kind: _range(tensors[kind].values()) for kind in KINDS}
        for label, tensors in found.items()
    ]
    return Table("Least and greatest RMS of each shape", rows)


def outside(found: Mapping[str, Values]) -> Table:
    """Which tensors leave the range asked for, layers of one kind together."""
    rows = []
    for label, tensors in found.items():
        for kind, bounds in KINDS.items():
            members: dict[str, list[float]] = {}
            for path, value in tensors[kind].items():
                name = ".".join("*" if part.isdigit() else part for part in path.split("."))
                members.setdefault(name, []).append(value)
            for name, values in members.items():
                beyond = [value for value in values if bounds and not within(value, bounds)]
                if beyond:
                    row = {"layers x width": label, "kind": kind, "tensor": name}
                    row |= {"outside": len(beyond), "of": len(values), "RMS": _range(beyond)}
                    rows.append(row)
    return Table("Outside the range asked for", rows)


def _range(values: Collection[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}"
