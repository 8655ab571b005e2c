"""How well unit scaling holds at initialisation: the RMS of every tensor, by depth and width.

    python -m recipes bench scales

One loss and gradient per shape, on tokens drawn independently and uniformly from a vocabulary much
larger than a sequence, which is what the rules assume of data; the last row is real text, whose
bytes repeat. Every other assumption (independence inside the model) is left as it is, and a tensor
outside the range asked for is named. What attention gives is much the same at all positions, so
that the sample behind its RMS is nearer to batch x width numbers than to tokens x width: take no
small batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx

from unitscale import nn

from ..errors import RecipeError
from ..gpt import build
from ..gpt.config import GPTConfig
from ..run.batch import loss_inputs
from ..run.probe import Reading, probe
from ..text import load_corpus
from ._table import JsonPath, Table, publish, within

BETWEEN_BLOCKS, DENSE = (0.5, 2.0), (0.8, 1.25)
DEPTHS, WIDTHS = "4,8,16,32", "64,128,256,512,1024,2048"
VOCAB, HEAD = 4096, 32


class Category(NamedTuple):
    """A kind of tensor; `asked` is its range, or None where it is only reported."""

    name: str
    asked: tuple[float, float] | None


# What a model's tensors are sorted into.
STREAM = Category("between blocks", BETWEEN_BLOCKS)
STREAM_GRADIENT = Category("gradients between blocks", BETWEEN_BLOCKS)
DENSE_OUTPUT = Category("Dense outputs", DENSE)
OTHER = Category("other outputs", None)
OTHER_GRADIENT = Category("gradients inside blocks", None)
LOGITS = Category("logits", None)
WEIGHT = Category("weights", None)
WEIGHT_GRADIENT = Category("weight gradients", None)
CATEGORIES = (
    STREAM,
    STREAM_GRADIENT,
    DENSE_OUTPUT,
    OTHER,
    OTHER_GRADIENT,
    LOGITS,
    WEIGHT,
    WEIGHT_GRADIENT,
)


class Found(NamedTuple):
    """The RMS of one model's tensors, by category and by path."""

    label: str
    values: dict[Category, dict[str, float]]


def main(
    depths: Annotated[str, typer.Option(help="numbers of layers, at the second width")] = (DEPTHS),
    widths: Annotated[str, typer.Option(help="widths, at the first depth")] = WIDTHS,
    batch: Annotated[int, typer.Option(min=1, help="sequences")] = 16,
    length: Annotated[int, typer.Option(min=2, help="tokens of each sequence")] = 128,
    data: Annotated[str | None, typer.Option(help="real text; by default Python's library")] = None,
    policy: Annotated[str, typer.Option(help="formats: float32, bfloat16, float16, fp8")] = (
        "float32"
    ),
    json: JsonPath = None,
) -> None:
    """Prints the RMS of activations, weights and gradients at initialisation."""
    layers, sizes = _numbers("--depths", depths), _numbers("--widths", widths)
    usual = sizes[min(1, len(sizes) - 1)]
    shapes = [(depth, usual) for depth in layers]
    shapes += [(layers[0], width) for width in sizes if width != usual]
    if len(layers) > 1:
        shapes.append((layers[-1], sizes[0]))
    rows, found = [], []
    for depth, width in dict.fromkeys(shapes):
        config = _config(depth, width, length, batch, policy, VOCAB)
        tokens = np.random.default_rng(0).integers(0, VOCAB, (batch, length + 1)).astype(np.int32)
        rows.append((config, "random", tokens))
    config = _config(layers[0], usual, length, batch, policy, 256, data)
    rows.append((config, "text", next(load_corpus(config.data).validation(1))))
    for config, kind, tokens in rows:
        label = f"{config.model.layers} x {config.model.width} {kind}"
        found.append(Found(label, measure(config, tokens)))
        jax.clear_caches()  # each shape is compiled once, and large ones hold much memory
    tables = [_summary(found), _by_shape(found), _outside(found)]
    publish("scales", tables, json, _notes(batch, length))


def measure(config: GPTConfig, tokens: np.ndarray) -> dict[Category, dict[str, float]]:
    """The RMS of every tensor of a config's model, by category and by path.

    Args:
      config: Describes the model.
      tokens: int32 (batch, time + 1), inputs and, one further, targets.

    Returns:
      The RMS values.
    """
    model = build(config)
    reading = probe(model, *loss_inputs(tokens))
    found = _sort(model, reading)
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = ".".join(map(str, path))
        found[WEIGHT][name] = float(jnp.sqrt(jnp.mean(jnp.square(leaf.get_value()))))
    return found


def _sort(model: Any, reading: Reading) -> dict[Category, dict[str, float]]:
    kinds = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    found: dict[Category, dict[str, float]] = {category: {} for category in CATEGORIES}
    for path in reading.activations:
        module = kinds[path.rstrip("'")]
        stream = isinstance(module, (nn.Embed, nn.PositionalEmbed, nn.TransformerLayer))
        if isinstance(module, nn.Dense):
            category = DENSE_OUTPUT
        elif isinstance(module, nn.Readout):
            category = LOGITS
        else:
            category = STREAM if stream else OTHER
        found[category][path] = float(reading.activations[path])
        gradients = STREAM_GRADIENT if stream else OTHER_GRADIENT
        found[gradients][path] = float(reading.gradients[path])
    found[WEIGHT_GRADIENT] = {path: float(value) for path, value in reading.weights.items()}
    return found


def _config(
    layers: int,
    width: int,
    length: int,
    batch: int,
    policy: str,
    vocab: int,
    path: str | None = None,
) -> GPTConfig:
    tree = {
        "name": "scales",
        "policy": policy,
        "model": {"layers": layers, "width": width, "heads": max(1, width // HEAD), "vocab": vocab},
        "data": {"path": path, "sequence_length": length, "batch_size": batch},
    }
    return GPTConfig.model_validate(tree)


def _summary(found: Sequence[Found]) -> Table:
    """Every kind of tensor over all shapes."""
    columns = {
        "tensors": "",
        "asked": "",
        "least": ".3f",
        "at": "",
        "greatest": ".3f",
        "at ": "",
        "within": "",
    }
    rows = []
    for category in CATEGORIES:
        values = [
            (value, f"{one.label}: {path}")
            for one in found
            for path, value in one.values[category].items()
        ]
        (least, low), (greatest, high) = min(values), max(values)
        row = {
            "tensors": category.name,
            "least": least,
            "at": low,
            "greatest": greatest,
            "at ": high,
        }
        if category.asked:
            inside = within(least, category.asked) and within(greatest, category.asked)
            row |= {"asked": "{} to {}".format(*category.asked), "within": inside}
        rows.append(row)
    return Table("RMS at initialisation, over all shapes", columns, rows)


def _by_shape(found: Sequence[Found]) -> Table:
    """Every shape, the kinds that a range is asked for."""
    columns = {"layers x width": ""} | {c.name: "" for c in CATEGORIES}
    rows = [
        {"layers x width": one.label} | {c.name: _range(one.values[c].values()) for c in CATEGORIES}
        for one in found
    ]
    return Table("Least and greatest RMS of each shape", columns, rows)


def _range(values: Iterable[float]) -> str:
    known = list(values)
    return f"{min(known):.2f}-{max(known):.2f}"


def _outside(found: Sequence[Found]) -> Table:
    """Which tensors leave the range asked for, layers of one kind together."""
    columns = {"layers x width": "", "kind": "", "tensor": "", "outside": "", "of": "", "RMS": ""}
    rows = []
    for one in found:
        for category in (c for c in CATEGORIES if c.asked):
            for name, members in _by_kind(one.values[category]).items():
                beyond = [value for value in members if not within(value, category.asked)]
                if beyond:
                    rows.append(
                        {
                            "layers x width": one.label,
                            "kind": category.name,
                            "tensor": name,
                            "outside": len(beyond),
                            "of": len(members),
                            "RMS": _range(beyond),
                        }
                    )
    return Table("Outside the range asked for", columns, rows)


def _by_kind(values: dict[str, float]) -> dict[str, list[float]]:
    """Values of the same tensor in different layers, under its path with * for the layer."""
    kinds: dict[str, list[float]] = {}
    for path, value in values.items():
        name = ".".join("*" if part.isdigit() else part for part in path.split("."))
        kinds.setdefault(name, []).append(value)
    return kinds


def _notes(batch: int, length: int) -> list[str]:
    return [
        f"{batch} sequences of {length} tokens, heads of {HEAD}; random: independent uniform "
        f"tokens of a vocabulary of {VOCAB}; text: bytes.",
        "logits are meant to have RMS width^-1/2 (u-muP's readout).",
    ]


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise RecipeError(
            f"{option}: expected positive integers separated by commas; got {text!r}; give such as "
            "4,8"
        )
    return sorted(set(numbers))
