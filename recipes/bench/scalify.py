"""What `unitscale.scalify` gives and what it costs, on programs written without it.

    python -m recipes bench scalify --data TEXT

Trains the GPT of `configs/gpt/parity.yaml` in plain `flax.nnx`: in float32, and under scalify in
float32, in float16 (parameters and Adam's state too) and with FP8 products and gradients. Then the
time of a step, the time to compile it, and programs that plain float16 cannot compute.
"""

from __future__ import annotations

import statistics
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console

from unitscale import as_scaled, to_array
from unitscale.transforms import scalify as transform

from ..errors import RecipeError
from ..gpt.config import GPTConfig
from ..text import load_corpus
from ._extremes import Program, error, programs
from ._runs import PARITY, ConfigPath, DataPath, Fresh, Overrides, Run, trained, variant
from ._steps import seconds_to_compile, stepper
from ._table import JsonPath, Table, publish, within
from ._timing import interleaved, ratio

FORMATS = {
    "float32": "{storage: float32}",
    "float16": "{storage: float16}",
    "fp8": "{storage: float16, products: float8_e4m3fn, gradients: float8_e5m2}",
}
MOST_DIFFERENCE = {"float16": 0.003, "fp8": 0.01}
MOST_TIME, MOST_COMPILE, MOST_ERROR = 1.10, 2.5, 0.02


def main(
    overrides: Overrides = None,
    config: ConfigPath = str(PARITY),
    data: DataPath = None,
    learning_rate: Annotated[
        float, typer.Option(help="peak learning rate of the plain model")
    ] = 1e-3,
    fresh: Fresh = False,
    runs: Annotated[bool, typer.Option(help="train the models")] = True,
    formats: Annotated[str, typer.Option(help="formats to train in, separated by commas")] = (
        ",".join(FORMATS)
    ),
    rounds: Annotated[int, typer.Option(min=4, help="timed steps of each program")] = 40,
    compilations: Annotated[int, typer.Option(min=1, help="of each program")] = 3,
    json: JsonPath = None,
) -> None:
    """Prints losses, step times and compile times under scalify, and programs of wide range."""
    words = [*(overrides or ()), *([] if data is None else [f"data.path={data}"])]
    words += [
        "policy=float32",
        "model.library=plain",
        "optimizer.umup=false",
        "optimizer.weight_decay=0.0",
        f"optimizer.learning_rate={learning_rate}",
    ]
    plain = variant(config, words, "plain-float32")
    scaled = {
        name: variant(config, words, f"scalify-{name}", f"scalify={settings}")
        for name, settings in FORMATS.items()
    }
    wanted = formats.split(",")
    if unknown := [name for name in wanted if name not in FORMATS]:
        raise RecipeError(
            f"--formats: expected some of {', '.join(FORMATS)}; got {', '.join(unknown)}"
        )
    tables = []
    if runs:
        console = Console()
        corpus = load_corpus(plain.data)
        reference = trained(plain, corpus, fresh, console)
        found = {name: trained(scaled[name], corpus, fresh, console) for name in wanted}
        tables.append(losses(reference, found))
    tables.append(costs(plain, scaled["float32"], rounds, compilations))
    tables.append(extremes(programs()))
    notes = [
        f"learning rate {learning_rate}, no loss scale; float16: parameters, Adam's state and "
        "activations; fp8: as float16, operands of linear layers in E4M3 and the gradients of "
        "their outputs in E5M2, no dynamic rescale. Readout and attention products stay float16.",
        "Everyday functions, each at three input scales: pytest tests/transforms -k "
        "value_and_gradient. The rule of every primitive: python -m unitscale.transforms.",
    ]
    publish("scalify", tables, json, notes)


def losses(reference: Run, runs: dict[str, Run]) -> Table:
    """Validation loss of each run, and its distance to the plain float32 program."""
    rows: list[dict[str, Any]] = [{"program": "plain float32", "validation loss": reference.loss}]
    for name, run in runs.items():
        difference = run.loss / reference.loss - 1
        row = {
            "program": f"scalify {name}",
            "validation loss": run.loss,
            "over plain float32": difference,
        }
        if name in MOST_DIFFERENCE:
            most = MOST_DIFFERENCE[name]
            row |= {"asked": f"within {most:.1%}", "within": within(difference, (-most, most))}
        rows.append(row)
    columns = {
        "program": "",
        "validation loss": ".5f",
        "over plain float32": "+.3%",
        "asked": "",
        "within": "",
    }
    return Table("Validation loss in nats per byte", columns, rows)


def costs(plain: GPTConfig, scaled: GPTConfig, rounds: int, compilations: int) -> Table:
    """Time of a step and time to trace and compile it, scalified over plain, both float32."""
    compiled = [
        (seconds_to_compile(scaled), seconds_to_compile(plain)) for _ in range(compilations)
    ]
    ours, theirs = (statistics.median(times) for times in zip(*compiled, strict=True))
    first, second = interleaved(stepper(scaled), stepper(plain), rounds)
    elapsed = ratio(first.elapsed, second.elapsed)
    rows = [
        {
            "what": "step",
            "scalify s": float(np.median(first.elapsed)),
            "plain s": float(np.median(second.elapsed)),
            "ratio": elapsed.median,
            "lower quartile": elapsed.low,
            "upper quartile": elapsed.high,
            "asked": f"<= {MOST_TIME}",
            "within": within(elapsed.median, (None, MOST_TIME)),
        },
        {
            "what": "trace and compile",
            "scalify s": ours,
            "plain s": theirs,
            "ratio": ours / theirs,
            "asked": f"<= {MOST_COMPILE}",
            "within": within(ours / theirs, (None, MOST_COMPILE)),
        },
    ]
    columns = {
        "what": "",
        "scalify s": ".3f",
        "plain s": ".3f",
        "ratio": ".3f",
        "lower quartile": ".3f",
        "upper quartile": ".3f",
        "asked": "",
        "within": "",
    }
    return Table("Cost of scalify in float32", columns, rows)


def extremes(wide: list[Program]) -> Table:
    """Relative RMS error against float32, of float16 without and with scalify."""
    rows = []
    for name, function, arguments in wide:
        expected = jax.jit(function)(*arguments)
        half = jax.tree.map(lambda x: x.astype(jnp.float16), arguments)
        ours = to_array(jax.jit(transform(function))(*as_scaled(arguments, dtype=jnp.float16)))
        found = error(ours, expected)
        rows.append(
            {
                "program": name,
                "plain float16": error(jax.jit(function)(*half), expected),
                "scalify float16": found,
                "asked": f"<= {MOST_ERROR:.0%}",
                "within": within(found, (None, MOST_ERROR)),
            }
        )
    columns = {
        "program": "",
        "plain float16": ".2%",
        "scalify float16": ".2%",
        "asked": "",
        "within": "",
    }
    return Table("Relative RMS error against float32", columns, rows)
