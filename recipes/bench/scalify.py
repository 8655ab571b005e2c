"""Measure losses, step time and compile time of plain programs under `unitscale.scalify`.

    python -m recipes bench scalify --data TEXT --seeds 5

Trains the plain GPT of `configs/gpt/parity.yaml` in float32, under scalify in float16 (including
Adam's state), and under scalify with FP8 matmuls; then times a step and its compilation.
"""

from typing import Annotated, Any

import typer

from ..gpt.config import GPTConfig
from ..registry import CONFIGS, load_kind
from . import runs
from .step import compile_seconds, stepper, time_ratio

BOUNDS = {"scalify-float16": 0.002, "scalify-fp8": 0.005}
MOST_TIME, MOST_COMPILING = 1.03, 1.5


def main(
    overrides: runs.Overrides = None,
    config: runs.ConfigPath = None,
    data: runs.DataPaths = None,
    rounds: Annotated[int, typer.Option(min=0, help="timed steps; 0 for none")] = 40,
    seeds: runs.Seeds = 1,
    jobs: runs.Jobs = 1,
    fresh: runs.Fresh = False,
    json: runs.JsonPath = None,
) -> None:
    """Print losses, step times and compile times under scalify."""
    words = runs.plain_words()
    half = (*words, "precision=scalify_float16")
    variants = {"plain-float32": words, "scalify-float16": half}
    variants["scalify-fp8"] = (*words, "precision=scalify_fp8")
    told = runs.Told(config, overrides, seeds, fresh, data, jobs)
    tables = runs.compare(variants, told).tables("Validation loss", BOUNDS)
    if rounds:
        path, given = config or CONFIGS / runs.PARITY, overrides or []
        exact, narrow, reference = (
            load_kind(GPTConfig, path, [*given, *own])
            for own in ((*words, "precision.scalify=float32"), half, words)
        )
        found = time_ratio(stepper(exact), stepper(reference), rounds)
        rows = [found | runs.asked(found["ratio"], MOST_TIME)]
        tables.append(runs.Table("Time of a step, scalify in float32 over plain", rows))
        seconds, rows = compile_seconds(reference), []
        for name, one in (("float32", exact), ("float16", narrow)):
            row: dict[str, Any] = {"storage": name, "s": compile_seconds(one), "plain s": seconds}
            row["ratio"] = row["s"] / seconds
            rows.append(row | (runs.asked(row["ratio"], MOST_COMPILING) if one is exact else {}))
        tables.append(runs.Table("Trace and compile, over plain", rows))
    runs.publish("scalify", tables, json)
