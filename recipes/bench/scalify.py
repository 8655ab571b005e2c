"""What `unitscale.scalify` costs, on programs written without it.

    python -m recipes bench scalify --data TEXT --seeds 5

Trains the GPT of `configs/gpt/parity.yaml` in plain `flax.nnx`: in float32, and under scalify in
float16 (parameters and Adam's state too), in float32, and with FP8 matmuls and gradients. Then the
time of a step, and the CPU time to compile it.
"""

from typing import Annotated, Any

import typer

from ..gpt.config import GPTConfig
from ..registry import CONFIGS, load_kind
from . import runs
from .step import compile_times, stepper, time_ratio

FORMATS = {
    "float16": "precision=scalify_float16",
    "fp8": "precision=scalify_fp8",
    "float32": "precision.scalify=float32",
    "bfloat16": "precision=scalify_bfloat16",
}
BOUNDS = {"scalify-float16": 0.002, "scalify-fp8": 0.005}
MOST_TIME, MOST_COMPILE = 1.03, 1.5


def main(
    overrides: runs.Overrides = None,
    config: runs.ConfigPath = None,
    data: runs.DataPaths = None,
    formats: Annotated[str, typer.Option(help=f"of {', '.join(FORMATS)}")] = "float16,fp8",
    plain_learning_rate: runs.PlainRate = runs.PLAIN_RATE,
    train: Annotated[bool, typer.Option(help="train the models")] = True,
    rounds: Annotated[int, typer.Option(min=0, help="timed steps; 0 for none")] = 40,
    seeds: runs.Seeds = 1,
    jobs: runs.Jobs = 1,
    fresh: runs.Fresh = False,
    json: runs.JsonPath = None,
) -> None:
    """Prints losses, step times and compile times under scalify."""
    plain = runs.plain_words(plain_learning_rate)
    variants = {"plain-float32": plain}
    for name in runs.chosen("--formats", formats, FORMATS):
        variants[f"scalify-{name}"] = (*plain, FORMATS[name])
    tables = []
    if train:
        told = runs.Told(config, overrides, seeds, fresh, data, jobs)
        tables += runs.compare(variants, told).tables("Validation loss", BOUNDS)
    if rounds:
        path, words = config or CONFIGS / runs.PARITY, [*(overrides or []), *plain]
        scaled = {
            name: load_kind(GPTConfig, path, [*words, FORMATS[name]])
            for name in ("float32", "float16")
        }
        tables += costs(load_kind(GPTConfig, path, words), scaled, rounds)
    runs.publish("scalify", tables, json)


def costs(plain: GPTConfig, scaled: dict[str, GPTConfig], rounds: int) -> list[runs.Table]:
    """Time of a step, and CPU time to trace and compile it, scalified over plain."""
    times = time_ratio(stepper(scaled["float32"]), stepper(plain), rounds)
    step = [times | runs.asked(times["ratio"], MOST_TIME)]
    reference, rows = compile_times(plain)[1], []
    for name, config in scaled.items():
        row: dict[str, Any] = {"storage": name, "s": compile_times(config)[1], "plain s": reference}
        row["ratio"] = row["s"] / reference
        rows.append(row | (runs.asked(row["ratio"], MOST_COMPILE) if name == "float32" else {}))
    titles = "Time of a step, scalify in float32 over plain", "Trace and compile, over plain"
    return [runs.Table(titles[0], step), runs.Table(titles[1], rows)]
