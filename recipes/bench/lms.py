"""What 16 and 8 bits cost language models, and how far ahead of training their data is.

    python -m recipes bench lms --data TEXT

Trains `configs/bert/books.yaml` once for each policy, all with the same seed and data and none with
a loss scale, and compares their loss over all validation text, of which the same tokens are always
hidden. With `--finetune`, each of these models is tuned on the tasks whose files are given, with
several seeds, and scored. A run that is complete in `train.runs_dir` is used as it is, and one that
was stopped is resumed. With `--charlm`, counts what a finished sweep found. Then compares logits of
imported weights, and times each quick start's input pipeline against its training steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from ..bert.config import BertConfig
from ..config import RunConfig
from ..errors import RecipeError
from ..registry import load_run_config
from ..run.recipe import load_data
from ._imported import folders, logits_table
from ._runs import ConfigPath, DataPath, Fresh, Overrides, run_variant, trained
from ._steps import stepper_on
from ._study import counts, read_best
from ._table import JsonPath, Table, publish, within
from ._tasks import (
    question_words,
    scores_table,
    sentence_words,
    split_articles,
    task_config,
    tuned_scores,
)
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
    finetune: Annotated[bool, typer.Option("--finetune", help="tune them on tasks too")] = False,
    sst2: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="TRAIN DEV", help="TSV files, with names of columns or without"),
    ] = None,
    squad: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON, which is split by article")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="fine-tuning runs of each, from seed 0")] = 3,
    tuning: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="override of fine-tuning, such as train.steps=100"),
    ] = None,
    charlm: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="a finished sweep, or its rows.jsonl")
    ] = None,
    logits: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Hugging Face folder with reference.npz"),
    ] = None,
    pipelines: Annotated[bool, typer.Option(help="time the input pipelines")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="timings of each pipeline")] = 10,
    fresh: Fresh = False,
    json: JsonPath = None,
) -> None:
    """Prints losses and scores by number format, logits of imported weights, pipeline speeds."""
    if finetune and not (runs and (sst2 or squad)):
        raise RecipeError(
            "--finetune: expected the pretraining runs and the files of a task; got "
            f"{'neither --sst2 nor --squad' if runs else '--no-runs'}; add --sst2 TRAIN DEV or "
            "--squad FILE, without --no-runs"
        )
    if not finetune and (sst2 or squad or tuning):
        raise RecipeError(
            "--sst2, --squad and --tuning: expected beside --finetune; got them alone; add it"
        )
    text = [] if data is None else [f"data.path={data}"]
    words = [*(overrides or ()), *text]
    tables, notes = [], []
    best = None if charlm is None else read_best(charlm)  # complains before hours of training
    imported = folders(logits or ())
    console = Console()
    if runs:
        wanted = pretraining(config, words)
        corpus = load_data(wanted["float32"])
        found = {name: trained(one, corpus, fresh, console) for name, one in wanted.items()}
        tables.append(losses(found, MOST_DIFFERENCE, "Masked-LM loss in nats per hidden token"))
        notes.append(
            f"{wanted['float32'].train.steps} steps of {Path(config).name}, seed "
            f"{wanted['float32'].seed}, no loss scale; loss over all "
            f"{sum(1 for _ in corpus.validation())} validation batches, their masks fixed."
        )
        if finetune:
            scores = tune(wanted, sst2, squad, seeds, tuning or (), fresh, console)
            tables.append(scores_table(scores))
            notes.append("Each policy's own pretrained model, tuned in the same policy.")
    if best is not None:
        tables.append(counts(best))
    if imported:
        tables.append(logits_table(imported))
    if pipelines:
        quickstarts = [load_run_config(CONFIGS / name, text) for name in QUICKSTARTS]
        tables.append(speeds([time_pipeline(one, rounds) for one in quickstarts]))
        notes.append(
            "Pipelines run in the thread that asks for the batch, steps on all of the device."
        )
    publish("lms", tables, json, notes)


def pretraining(config: str, words: Iterable[str]) -> dict[str, BertConfig]:
    """The pretraining run of each policy.

    Raises:
      RecipeError: The config is not that of a BERT.
    """
    found: dict[str, BertConfig] = {}
    for policy in ("float32", *MOST_DIFFERENCE):
        one = run_variant(config, words, policy, f"policy={policy}")
        if not isinstance(one, BertConfig):
            raise RecipeError(
                f"--config: expected a config of recipe bert; got recipe {one.recipe}; name one "
                "such as configs/bert/books.yaml"
            )
        found[policy] = one
    return found


def tune(
    pretrained: Mapping[str, BertConfig],
    sst2: tuple[str, str] | None,
    squad: str | None,
    seeds: int,
    words: Iterable[str],
    fresh: bool,
    console: Console,
) -> dict[tuple[str, str], list[float]]:
    """Scores in percent of every seed, by (metric, policy)."""
    first = pretrained["float32"]
    tasks: dict[str, tuple[str, str, float, list[str]]] = {}
    if sst2:
        tasks["sst2"] = ("SST-2 accuracy", "accuracy", 100.0, sentence_words(*sst2))
    if squad:
        parts = split_articles(squad, Path(first.train.runs_dir) / f"{first.name}-squad-split")
        tasks["squad"] = ("SQuAD F1", "f1", 1.0, question_words(*parts, first.context))
    return {
        (label, policy): [
            unit
            * tuned_scores(task_config(task, run, seed, [*own, *words]), fresh, console)[metric]
            for seed in range(seeds)
        ]
        for task, (label, metric, unit, own) in tasks.items()
        for policy, run in pretrained.items()
    }


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


def speeds(rows: list[dict[str, Any]]) -> Table:
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
