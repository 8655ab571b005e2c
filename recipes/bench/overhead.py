"""What unit scaling costs: step time over plain `flax.nnx`, and the operations factors add.

    python -m recipes bench overhead

Step time is that of the whole training step of `recipes.train`, in float32, for the same shape in
both libraries. Operations are those of the loss and its gradient as JAX lowers them, once as they
are and once with every factor of `unitscale.rules` set to 1, which leaves its multiplication out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..gpt.config import GPTConfig
from ..registry import load_config
from ._models import bert_large, flops, gpt
from ._steps import stepper
from ._table import JsonPath, Table, publish, within
from ._timing import compared, interleaved
from ._unfactored import unfactored

CONFIGS = Path(__file__).parents[2] / "configs" / "gpt"
LARGER = ("model.width=512", "model.heads=8", "data.sequence_length=256", "data.batch_size=4")
MOST_TIME, MOST_FLOPS = 1.05, 0.002

# Token ids as the models of these shapes were trained on them.
GPT2 = ("policy=float32", "model.vocab=50257", "model.tied_readout=true", "data.batch_size=8")


def main(
    rounds: Annotated[int, typer.Option(min=4, help="timed steps of each library")] = 60,
    larger: Annotated[bool, typer.Option(help="also time a model 512 wide")] = True,
    count: Annotated[bool, typer.Option(help="also count operations")] = True,
    json: JsonPath = None,
) -> None:
    """Prints step time over plain flax.nnx, and the operations that factors add."""
    parity = CONFIGS / "parity.yaml"
    shapes = [(), LARGER] if larger else [()]
    timed = [
        time_steps(load_config(parity, ["policy=float32", *shape]), rounds) for shape in shapes
    ]
    tables = [
        Table(
            "Time of a training step, unitscale float32 over plain flax.nnx float32",
            timed[0][1],
            [row for row, _ in timed],
        )
    ]
    if count:
        config = load_config(CONFIGS / "gpt2-small.yaml", GPT2)
        programs = [
            ("GPT-2 small", gpt(config), config.data.batch_size, config.data.sequence_length),
            ("BERT Large", bert_large(), 8, 512),
        ]
        rows = [count_factors(*program) for program in programs]
        rows[0]["over plain"] = rows[0]["with factors"] / flops(
            gpt(plain(config)), *programs[0][2:]
        )
        columns = {
            "shape": "",
            "sequences": ",d",
            "tokens each": ",d",
            "with factors": ".5e",
            "without": ".5e",
            "added": ".4%",
            "asked": "",
            "within": "",
            "over plain": ".4f",
        }
        tables.append(Table("Floating-point operations of loss and gradient", columns, rows))
    notes = [
        f"Each library's step was timed {rounds} times, in turns. ratio: median over rounds; "
        "quartiles likewise.",
        "over plain: all operations over those of the plain flax.nnx model of that shape, which "
        "counts what the backward pass computes again, too.",
    ]
    publish("overhead", tables, json, notes[: 1 + count])


def plain(config: GPTConfig) -> GPTConfig:
    """The same shape and optimizer in plain flax.nnx."""
    model = config.model.model_copy(update={"library": "plain"})
    optimizer = config.optimizer.model_copy(update={"umup": False})
    return config.model_copy(update={"model": model, "optimizer": optimizer})


def time_steps(config: GPTConfig, rounds: int) -> tuple[dict[str, Any], dict[str, str]]:
    """One row and its columns: the training steps of a config's model in both libraries."""
    times = interleaved(stepper(config), stepper(plain(config)), rounds)
    row, columns = compared("unitscale", "plain", times, MOST_TIME)
    shape, data = config.model, config.data
    name = (
        f"{shape.width} wide, {shape.layers} layers, {data.batch_size} x {data.sequence_length} "
        "tokens"
    )
    return {"model": name, **row}, {"model": "", **columns}


def count_factors(name: str, make: Callable[[], Any], batch: int, time: int) -> dict[str, Any]:
    """One row: the operations of a program with its factors and without."""
    with_factors = flops(make, batch, time)
    with unfactored():
        without = flops(make, batch, time)
    added = with_factors / without - 1
    return {
        "shape": name,
        "sequences": batch,
        "tokens each": time,
        "with factors": with_factors,
        "without": without,
        "added": added,
        "asked": f"added <= {MOST_FLOPS:.1%}",
        "within": within(added, (None, MOST_FLOPS)),
    }
