"""What number formats cost under scalify: test accuracy of one classifier in each of them.

    python -m recipes bench mnist configs/mnist/mlp.yaml data.train_images=PATH ...

Trains the config once for each format and seed, all on the same images in the same order.
"""

from typing import Annotated

import typer

from ._compare import compare, comparison
from ._runs import Fresh, Jobs, Overrides, Seeds, Told
from ._table import JsonPath, publish


def main(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="a YAML file")],
    overrides: Overrides = None,
    seeds: Seeds = None,
    jobs: Jobs = 1,
    fresh: Fresh = False,
    json: JsonPath = None,
) -> None:
    """Prints the test accuracy by number format."""
    found = compare(comparison("mnist"), Told(config, overrides, seeds, fresh, jobs=jobs))
    publish("mnist", [found.table()], json)
