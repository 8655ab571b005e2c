"""What 16 and 8 bits cost language models, and how far ahead of training their data is.

    python -m recipes bench lms --data TEXT

Trains `configs/bert/books.yaml` once for each policy, all with the same seed and data and none with
a loss scale, and compares their loss over all validation text, of which the same tokens are always
hidden. With `--finetune`, these models are tuned on the tasks whose files are given, with several
seeds, each from a model of its own where there are as many, and scored beside baselines that need
no pretraining; with `--adapt` half of the pretraining is on what the tasks have to train on. A run
that is complete in `train.runs_dir` is used as it is, and one that was stopped is resumed. With
`--charlm`, counts what a finished sweep found. Then compares logits of imported weights, and times
each quick start's input pipeline against its training steps.
"""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from ..config import RunConfig
from ..errors import RecipeError
from ..finetune.config import FinetuneConfig
from ..registry import CONFIGS, load_config
from ..run.recipe import recipe_of
from ._baselines import baselines
from ._compare import Compared, compare, comparison
from ._imported import folders, logits_table
from ._runs import ConfigPath, DataPath, Fresh, Jobs, Overrides, Seeds, Told
from ._study import read_study, study
from ._table import JsonPath, Table, asked, publish
from ._tasks import (
    adapted_words,
    contexts,
    sentences,
    split_articles,
    task_words,
    tuned_words,
)
from ._timing import seconds, stepper

QUICKSTARTS = "gpt/quickstart.yaml", "bert/quickstart.yaml"
LEAST_AHEAD = 20.0


def main(
    overrides: Overrides = None,
    config: ConfigPath = None,
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
    pairs: Annotated[
        bool,
        typer.Option("--pairs", help="tune them on pairs of --squad too: which sentence answers"),
    ] = False,
    adapt: Annotated[
        bool, typer.Option("--adapt", help="let half of the pretraining be on the tasks' texts")
    ] = False,
    policies: Annotated[
        str, typer.Option(help="number formats beside float32, a comma between two")
    ] = "float16,fp8",
    seeds: Seeds = None,
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
    jobs: Jobs = 1,
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
    if not finetune and (sst2 or squad or tuning or adapt):
        raise RecipeError(
            "--sst2, --squad, --tuning and --adapt: expected beside --finetune; got them alone; "
            "add it"
        )
    if pairs and not squad:
        raise RecipeError("--pairs: expected the file of SQuAD; got none; add --squad FILE")
    if adapt and data is None:
        raise RecipeError("--adapt: expected a text beside those of tasks; got none; add --data")
    entry = comparison("lms").only("--policies", policies)
    told = Told(config, overrides, seeds, fresh, data and [data], jobs)
    tables, notes = [], []
    curves = None if charlm is None else read_study(charlm)  # complains before hours of training
    imported = folders(logits or ())
    if runs:
        base = load_config(config or CONFIGS / comparison("lms").config, told.words)
        (text,) = told.texts
        folder = Path(base.train.runs_dir) / f"{base.name}{text}-squad-split"
        articles = split_articles(squad, folder) if squad else None
        if adapt and data:
            told = adapted(told, base, data, sst2, articles)
        found = compare(entry, told)
        tables.append(found.table())
        notes.append("No loss scale; loss over all validation text, its masks fixed.")
        if finetune:
            longest = found.configs[found.entry.reference][0].longest
            own = task_words(sst2, articles, longest, pairs=pairs)
            tables += tuned(found, own, Told(None, tuning, seeds, fresh, jobs=jobs))
            notes.append("Each policy's own pretrained models, tuned in the same policy.")
    if curves is not None:
        tables.append(study(curves))
    if imported:
        tables.append(logits_table(imported))
    if pipelines:
        (text,) = told.texts.values()
        rows = [time_pipeline(load_config(CONFIGS / name, text), rounds) for name in QUICKSTARTS]
        tables.append(Table("Tokens a second: input pipeline alone, and training", rows))
        notes.append(
            "Pipelines run in the thread that asks for the batch, steps on all of the device."
        )
    publish("lms", tables, json, notes)


def adapted(
    told: Told,
    base: RunConfig,
    data: str,
    sst2: tuple[str, str] | None,
    articles: tuple[Path, Path] | None,
) -> Told:
    """What is told of runs on one text, for pretraining on those of the tasks too."""
    texts = {"sst2": sentences(*sst2)} if sst2 else {}
    texts |= {"squad": contexts(articles[0])} if articles else {}
    return told._replace(overrides=[*told.words, *adapted_words(base, data, texts)], data=None)


def tuned(pretrained: Compared, tasks: Mapping[str, Sequence[str]], told: Told) -> list[Table]:
    """Scores of the pretrained models, tuned on tasks, and of baselines."""
    runs, reference = pretrained.configs, pretrained.entry.reference
    base = runs[reference][0].name.replace(f"-{reference}", "", 1)
    tables = []
    for task, words in tasks.items():
        given = [f"name={base}-{task}", *words]
        own = {policy: partial(_tuning, models, given) for policy, models in runs.items()}
        found = compare(comparison(task).of([*runs]), told, own)
        config = cast(FinetuneConfig, found.configs[reference][0])
        table = found.table()
        tables.append(Table(table.title, [*table.rows, *baselines(config)], table.configs))
    return tables


def _tuning(models: Sequence[RunConfig], words: Sequence[str], number: int) -> list[str]:
    """Overrides of the tuning run of some number, which starts from the model of that number."""
    return [*tuned_words(models[number % len(models)]), *words]


def time_pipeline(config: RunConfig, rounds: int, batches: int = 50) -> dict[str, Any]:
    """One row: tokens a second of a config's batches and of its training steps, medians."""
    pipeline = recipe_of(config).load_data(config).training(config.seed)
    step = stepper(config, next(pipeline))
    step()  # compiles

    def draw() -> None:
        for _ in range(batches):
            next(pipeline)

    tokens = config.data.step_size
    produced = tokens * batches / statistics.median([seconds(draw) for _ in range(rounds)])
    consumed = tokens / statistics.median([seconds(step) for _ in range(rounds)])
    ahead = produced / consumed
    row = {"config": config.name, "produced": produced, "consumed": consumed}
    return row | {"times ahead": ahead, **asked(ahead, least=LEAST_AHEAD)}
