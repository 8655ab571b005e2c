"""What 16 and 8 bits cost a BERT, and how far ahead of training its data is.

    python -m recipes bench lms --data TEXT

Trains `configs/bert/books.yaml` once for each policy, all with the same seed and data and none with
a loss scale, and compares their loss over all validation text, of which the same tokens are always
hidden. A run that is complete in `train.runs_dir` is used as it is, and one that was stopped is
resumed. Then times each quick start's input pipeline against its training steps.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from ..config import RunConfig
from ..configfile import load_run_config
from ..task import load_data
from ._runs import ConfigPath, DataPath, Fresh, Overrides, run_variant, trained
from ._steps import stepper_on
from ._table import JsonPath, Table, publish, within
from .parity import losses

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTARTS = "gpt/quickstart.yaml", "bert/quickstart.yaml"

MOST_DIFFERENCE = {"float16": 0.002, "fp8": 0.007}
LEAST_AHEAD = 20.0


def main(
    overrides: Overrides = None,
    config: ConfigPath = str(CONFIGS / "bert" / "books.yaml"),
    data: DataPath = None,
    runs: Annotated[bool, typer.Option(help="train and compare the policies")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="timings of each pipeline")] = 10,
    fresh: Fresh = False,
    json: JsonPath = None,
) -> None:
    """Prints masked-LM loss by number format, and the speed of the input pipelines."""
    text = [] if data is None else [f"data.path={data}"]
    words = [*(overrides or ()), *text]
    tables, notes = [], []
    if runs:
        console = Console()
        wanted = {
            policy: run_variant(config, words, policy, f"policy={policy}")
            for policy in ("float32", *MOST_DIFFERENCE)
        }
        corpus = load_data(wanted["float32"])
        found = {name: trained(one, corpus, fresh, console) for name, one in wanted.items()}
        tables.append(losses(found, MOST_DIFFERENCE, "Masked-LM loss in nats per hidden token"))
        notes.append(
            f"{wanted['float32'].train.steps} steps of {Path(config).name}, seed "
            f"{wanted['float32'].seed}, no loss scale; loss over all "
            f"{sum(1 for _ in corpus.validation())} validation batches, their masks fixed."
        )
    quickstarts = [load_run_config(CONFIGS / name, text) for name in QUICKSTARTS]
    tables.append(pipelines([time_pipeline(one, rounds) for one in quickstarts]))
    notes.append("Pipelines run in the thread that asks for the batch, steps on all of the device.")
    publish("lms", tables, json, notes)


def time_pipeline(config: RunConfig, rounds: int, batches: int = 50) -> dict[str, Any]:
    """One row: tokens a second of a config's batches and of its training steps, medians."""
    pipeline = load_data(config).training(config.seed)
    step = stepper_on(config, next(pipeline))
    step()  # compiles

    def draw() -> None:
        for _ in range(batches):
            next(pipeline)

    tokens = config.data.batch_size * config.data.sequence_length
    produced = tokens * batches / float(np.median([_seconds(draw) for _ in range(rounds)]))
    consumed = tokens / float(np.median([_seconds(step) for _ in range(rounds)]))
    return {"config": config.name, "produced": produced, "consumed": consumed}


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def pipelines(rows: list[dict[str, Any]]) -> Table:
    """Speed of each pipeline over what its model consumes."""
    for row in rows:
        row["ratio"] = row["produced"] / row["consumed"]
        row["asked"] = f">= {LEAST_AHEAD:g}"
        row["within"] = within(row["ratio"], (LEAST_AHEAD, None))
    columns = {
        "config": "",
        "produced": ",.0f",
        "consumed": ",.0f",
        "ratio": ".1f",
        "asked": "",
        "within": "",
    }
    return Table("Tokens a second: input pipeline alone, and training", columns, rows)
