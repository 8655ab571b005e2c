"""Unit scaling beside plain `flax.nnx`, both in float32, each at the best of its learning rates.

    python -m recipes bench libraries --data TEXT

Trains the GPT of `configs/gpt/parity.yaml`, or with `--config` another GPT or a BERT, in both
libraries at every rate that is given, with several seeds; `--rate-seeds` is how many of them, if
the rest is trained at the best rates alone. The best rate of a library is that of the least mean
loss; where it is the first or the last of the list, a better one may lie beyond it. A run that is
complete in `train.runs_dir` is used as it is.
"""

from typing import Annotated

import typer

from ..registry import load_config
from ._compare import Compared, compare, comparison, judged
from ._numbers import numbers
from ._runs import ConfigPath, DataPaths, Fresh, Jobs, Overrides, Seeds, Told, digest_of
from ._table import JsonPath, Table, publish

PLAIN, UNIT = "plain-float32", "float32"


def main(
    overrides: Overrides = None,
    config: ConfigPath = None,
    data: DataPaths = None,
    plain_rates: Annotated[
        str, typer.Option(help="peak learning rates of plain models, a comma between two")
    ] = "0.001,0.002,0.004,0.008",
    unit_rates: Annotated[
        str | None, typer.Option(help="those of unit scaling; by default the config's own alone")
    ] = None,
    seeds: Seeds = None,
    rate_seeds: Annotated[
        int | None, typer.Option(min=1, help="seeds that find the best rates; by default all")
    ] = None,
    jobs: Jobs = 1,
    fresh: Fresh = False,
    json: JsonPath = None,
) -> None:
    """Prints the loss at every rate, and of both libraries at their best."""
    rates = {PLAIN: numbers("--plain-rates", plain_rates, float)}
    if unit_rates is not None:
        rates[UNIT] = numbers("--unit-rates", unit_rates, float)
    told, entry = Told(config, overrides, seeds, fresh, data, jobs), comparison("libraries")
    if config is not None:
        given = load_config(config)
        title = f"Validation loss in nats per {given.loss_unit}"
        entry = entry.model_copy(update={"recipe": given.recipe, "title": title})
    entry = entry.at_rates(rates)
    swept = compare(entry, told if rate_seeds is None else told._replace(seeds=rate_seeds))
    best = entry.of([swept.best(PLAIN), swept.best(UNIT)])
    found = swept if rate_seeds is None else compare(best, told)
    notes = ["Rates are peaks of the config's schedule; unit scaling has those of u-muP."]
    publish("libraries", [*swept.tables(), at_best(found)], json, notes)


def at_best(found: Compared) -> Table:
    """Unit scaling over plain `flax.nnx`, each at its best rate, seed by seed."""
    names = found.best(PLAIN), found.best(UNIT)
    rows = judged({name: found.values[name] for name in names}, names[0], {names[1]: "no worse"})
    for row, name in zip(rows, names, strict=True):
        row["variant"] = found.entry.label(name).partition(",")[0]
        row["learning rate"] = found.configs[name][0].optimizer.learning_rate
    configs = [config for name in names for config in found.configs[name]]
    title = f"Each at its best learning rate: {found.runs(found.texts)}"
    return Table(title, rows, digest_of(configs))
