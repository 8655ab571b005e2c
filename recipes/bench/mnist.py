"""What number formats cost under scalify: test accuracy of one classifier in each of them.

    python -m recipes bench mnist configs/mnist/mlp.yaml data.train_images=PATH ...

Trains the config once for each format and seed, all on the same images in the same order; with
`--rates` at the learning rate of these that is best for the program without scalify.
"""

from typing import Annotated

import typer

from ._compare import compare, comparison
from ._numbers import numbers
from ._runs import Fresh, Jobs, Overrides, Seeds, Told
from ._table import JsonPath, Table, publish


def main(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="a YAML file")],
    overrides: Overrides = None,
    rates: Annotated[
        str | None, typer.Option(help="learning rates to try first; by default the config's alone")
    ] = None,
    seeds: Seeds = None,
    jobs: Jobs = 1,
    fresh: Fresh = False,
    json: JsonPath = None,
) -> None:
    """Prints the test accuracy by number format."""
    entry, told = comparison("mnist"), Told(config, overrides, seeds, fresh, jobs=jobs)
    tables = []
    if rates is not None:
        tried = {entry.reference: numbers("--rates", rates, float)}
        found = compare(entry.of([entry.reference]).at_rates(tried), told)
        at_rates = found.table()
        tables.append(Table("Test accuracy by learning rate", at_rates.rows, at_rates.configs))
        rate = found.configs[found.best()][0].optimizer.learning_rate
        told = told._replace(overrides=[*told.words, f"optimizer.learning_rate={rate}"])
    found = compare(entry, told)
    publish("mnist", [*tables, found.table()], json)
