"""Measure losses and scores of language models by number format.

    python -m recipes bench lms --data TEXT --sst2 TRAIN DEV --squad FILE --seeds 3
    python -m recipes bench lms --no-runs --charlm FOLDER
    python -m recipes bench lms --no-runs --lora FOLDER --data TEXT --seeds 5

Trains `configs/bert/books.yaml` in each format without a loss scale, and compares the losses over
the whole validation text, with the same hidden tokens. Given the files of a task, it fine-tunes
every model on it in the model's format. `--charlm` adds the tables of a finished sweep of
`configs/charlm/small.yaml`, given its folder. `--lora` tunes a decoder in Hugging Face format with
`configs/llama/lora.yaml`, its frozen weights in 8 and in 4 bits.
"""

import json as json_text
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import RecipeError, read_text, write_whole
from ..finetune.data import read_squad
from ..registry import CONFIGS, load_config
from ..run.folder import CONFIG, is_run, run_folder
from ..sweep.points import by_format, make_points, read_curves
from . import runs

BOUNDS = {"float16": 0.002, "fp8": 0.007}
METRICS = {"sst2": "accuracy", "squad": "f1"}
HELD_OUT = 8  # every eighth article is for validation
MOST_ABOVE = 0.005


def main(
    overrides: runs.Overrides = None,
    config: runs.ConfigPath = None,
    data: Annotated[str | None, typer.Option(help="text; by default Python's library")] = None,
    train: Annotated[bool, typer.Option("--runs/--no-runs", help="train the models")] = True,
    sst2: Annotated[tuple[str, str] | None, typer.Option(metavar="TRAIN DEV")] = None,
    squad: Annotated[str | None, typer.Option(metavar="FILE", help="split by article")] = None,
    charlm: Annotated[Path | None, typer.Option(help="a finished sweep's folder")] = None,
    lora: Annotated[Path | None, typer.Option(help="a decoder's folder")] = None,
    seeds: runs.Seeds = 1,
    jobs: runs.Jobs = 1,
    fresh: runs.Fresh = False,
    json: runs.JsonPath = None,
) -> None:
    """Print losses and scores of BERT, character models and LoRA, by number format."""
    tables = [] if charlm is None else [study(charlm)]  # fails before hours of training
    if lora:
        frozen = {"8-bit": "float8_e4m3fn", "4-bit": "float4_e2m1fn"}
        variants = {name: (f"precision.frozen={dtype}",) for name, dtype in frozen.items()}
        words = [f"init={lora}", *(overrides or ())]
        told = runs.Told(None, words, seeds, fresh, data and [data], jobs)
        tuned = runs.compare(variants, told, config="llama/lora.yaml")
        tables += tuned.tables("Loss of LoRA by format of the base", {"4-bit": 0.005})
    if train:
        names = ["float32", *BOUNDS]
        variants = {name: (f"precision.policy={name}",) for name in names}
        base = load_config(config or CONFIGS / "bert/books.yaml", overrides or [])
        folder = Path(base.train.runs_dir)
        tasks: dict[str, list[str]] = {}
        if sst2:
            tasks["sst2"] = sentences(*sst2)
        if squad:
            tasks["squad"] = questions(squad, folder / f"{base.name}-squad")
        told = runs.Told(config, overrides, seeds, fresh, data and [data], jobs)
        pretrained = runs.compare(variants, told, config="bert/books.yaml")
        tables = [*pretrained.tables("Masked-LM loss", BOUNDS), *tables]

        def start(name: str, number: int) -> list[str]:
            one = pretrained.configs[name][number]
            words = [f"init={run_folder(one)}", f"train.runs_dir={run_folder(one).parent}"]
            return words if one.longest is None else [*words, f"data.sequence_length={one.longest}"]

        for task, words in tasks.items():
            words = [f"name={base.name}-{task}", *words]
            told, file = runs.Told(None, words, seeds, fresh, jobs=jobs), f"bert/{task}.yaml"
            found = runs.compare(variants, told, config=file, metric=METRICS[task], own=start)
            tables += found.tables(f"{METRICS[task]} on {task}")
    same = "No loss scale; models are pretrained and fine-tuned in the same format."
    runs.publish("lms", tables, json, [same] if train else [])


def sentences(train: str, validation: str) -> list[str]:
    """Return overrides for SST-2's files, with or without GLUE's header line."""
    named = "label" in read_text(Path(train), "--sst2").partition("\n")[0].split("\t")
    words = [f"data.train={train}", f"data.validation={validation}"]
    return words if named else [*words, "classification={header: false, text: 0, label: 1}"]


def questions(path: str, folder: Path) -> list[str]:
    """Split a SQuAD file by article, and return overrides for the two parts."""
    read_squad(path, "--squad")
    tree = json_text.loads(Path(path).read_text(encoding="utf-8"))
    articles = tree["data"]
    if len(articles) < HELD_OUT:
        raise RecipeError(f"--squad: expected at least {HELD_OUT} articles; got {len(articles)}")
    held = articles[HELD_OUT - 1 :: HELD_OUT]
    parts = {"train": [x for x in articles if x not in held], "validation": held}
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        write_whole(folder / f"{name}.json", json_text.dumps(tree | {"data": part}))
    return [f"data.{name}={folder / name}.json" for name in parts]


def study(folder: Path) -> runs.Table:
    """Count the models of a sweep whose loss does not rise in float16, or with unit scaling."""
    if not is_run(folder):
        raise RecipeError(f"--charlm: expected the folder of a sweep; got {folder}")
    curves = read_curves(make_points(load_config(folder / CONFIG)), folder)
    best = list(by_format(curves).values())

    def pairs(first: tuple[str, str], second: tuple[str, str]) -> list[float]:
        return [x[first].least / x[second].least - 1 for x in best if {first, second} <= x.keys()]

    def row(what: str, over: Sequence[float], most: float) -> dict[str, Any]:
        count = sum(x <= most for x in over)
        found = {"models with": what, "count": count, "of": len(over), "most": max(over, default=0)}
        return found | {"median": statistics.median(over) if over else 0.0}

    unit, regular, above = "unitscale", "plain", f"FP16 at most {MOST_ABOVE:.1%} above"
    half = pairs((unit, "float16"), (unit, "float32"))
    theirs = pairs((regular, "float16"), (regular, "float32"))
    both = pairs((unit, "float32"), (regular, "float32"))
    rows = [
        row(f"unit {above} unit FP32", half, MOST_ABOVE),
        row(f"regular {above} regular FP32", theirs, MOST_ABOVE),
        row("unit FP32 no worse than regular FP32", both, 0.0),
    ]
    return runs.Table("Character models, each at its best learning rate", rows)
