"""Compare unit scaling with plain `flax.nnx`, each at its best learning rate.

    python -m recipes bench libraries --data TEXT --seeds 3
    python -m recipes bench libraries --methods --data TEXT

Trains the GPT of `configs/gpt/parity.yaml`, or with `--config` another GPT or a BERT, in float32 in
both libraries, at all given learning rates. `--methods` adds methods of training in float16.
`python -m recipes sweep configs/gpt/transfer.yaml` finds the best rates by width.
"""

from typing import Annotated

import typer

from ..errors import RecipeError
from . import runs

BASELINE = "plain-float32"
LIBRARIES = {BASELINE: runs.plain_words(), "float32": ("precision.policy=float32",)}
_HALF = runs.plain_words(runs.PLAIN_RATE, "precision.policy=float16")
_AUTOMATIC = ("precision.loss_scale=dynamic",)
METHODS = {
    "plain-float16": _HALF,
    "loss-scale": (*_HALF, "precision.loss_scale=4096.0"),
    "auto-loss-scale": (*_HALF, *_AUTOMATIC),
    "tensor-scaling": (*_HALF, "precision.matmuls=fp8_dynamic"),
    "scalify-float16": (*runs.plain_words(), "precision=scalify_float16"),
    "float16": ("precision.policy=float16",),
}


def main(
    overrides: runs.Overrides = None,
    config: runs.ConfigPath = None,
    data: runs.DataPaths = None,
    plain_rates: Annotated[str, typer.Option(help="peak rates")] = "0.001,0.002,0.004,0.008",
    unit_rates: Annotated[str | None, typer.Option(help="by default the config's rate")] = None,
    methods: Annotated[bool, typer.Option("--methods", help="also train in float16")] = False,
    seeds: runs.Seeds = 3,
    jobs: runs.Jobs = 1,
    fresh: runs.Fresh = False,
    json: runs.JsonPath = None,
) -> None:
    """Print the losses of both libraries at all learning rates, and at the best ones."""
    variants = LIBRARIES | (METHODS if methods else {})
    by_library = {True: numbers("--plain-rates", plain_rates)}
    if unit_rates is not None:
        by_library[False] = numbers("--unit-rates", unit_rates)
    is_plain = {name: "model.library=plain" in words for name, words in variants.items()}
    rates = {name: by_library[one] for name, one in is_plain.items() if one in by_library}
    told = runs.Told(config, overrides, seeds, fresh, data, jobs)
    found = runs.compare(variants, told, config=runs.PARITY, rates=rates)
    tables = found.tables("Validation loss, each at its best learning rate", {"float32": 0.0})
    notes = ["Rates are peaks of the config's schedule; unit scaling uses u-muP's rates."]
    runs.publish("libraries", tables, json, notes)


def numbers(option: str, text: str) -> list[float]:
    """Parse a list of numbers above 0."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [0.0]
    if min(found) <= 0:
        raise RecipeError(f"{option}: expected numbers above 0, such as 0.1,0.2; got {text}")
    return found
