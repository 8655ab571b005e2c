"""What 16 and 8 bits cost: validation loss against float32, and gradients lost in float16.

    python -m recipes bench parity --data TEXT --data ANOTHER --seeds 5

Trains `configs/gpt/parity.yaml` for each policy on each text with each seed, the same seed and data
for all policies, none with a loss scale. Gradients are counted in the first float16 run and in one
of the same GPT in plain `flax.nnx`. A run that is complete in `train.runs_dir` is used as it is,
and one that was stopped is resumed.
"""

from typing import Annotated, Any

import typer

from ._compare import compare, comparison
from ._runs import ConfigPath, DataPaths, Fresh, Jobs, Overrides, PlainRate, Seeds, Told
from ._table import JsonPath, Table, asked, publish
from ._underflow import WHEN, Sample, Underflow, lost_gradients

LEAST_GAIN = dict(zip(WHEN, (10.0, 1.0), strict=True))


def main(
    overrides: Overrides = None,
    config: ConfigPath = None,
    data: DataPaths = None,
    policies: Annotated[
        str,
        typer.Option(
            help="what is compared with float32: float16, fp8, fp8-readout-gradients, "
            "fp8-readout, fp8-rebalance"
        ),
    ] = "float16,fp8",
    gradients: Annotated[
        bool, typer.Option(help="also count the gradients that float16 loses")
    ] = True,
    plain_learning_rate: PlainRate = None,
    seeds: Seeds = None,
    jobs: Jobs = 1,
    fresh: Fresh = False,
    json: JsonPath = None,
) -> None:
    """Prints validation loss by number format, and the share of gradients lost in float16."""
    told = Told(config, overrides, seeds, fresh, data, jobs)
    found = compare(comparison("parity").only("--policies", policies), told)
    tables, notes = found.tables(), ["No loss scale; loss over all validation text."]
    if gradients:
        entry, first = comparison("underflow"), told._replace(seeds=1, data=data and data[:1])
        runs: Any = compare(entry, first, entry.at_rate(plain_learning_rate)).configs
        sample = Sample.of(runs["float16"][0])
        both = [lost_gradients(runs[name][0], sample) for name in entry.variants]
        tables.append(lost(*both))
        notes.append(
            "Gradients: all parameters; both formats from the same float32 parameters. The end is "
            f"that of each library's own float16 run. {sample}"
        )
    publish("parity", tables, json, notes)


def lost(ours: list[Underflow], theirs: list[Underflow]) -> Table:
    """Share of gradient entries that float16 loses, ours beside plain flax.nnx."""
    rows = []
    for when, *both in zip(WHEN, ours, theirs, strict=True):
        for library, one in zip(("unitscale", "plain flax.nnx"), both, strict=True):
            row: dict[str, Any] = {
                "when": when,
                "library": library,
                "entries": one.entries,
                "lost": one.lost,
                "share lost": one.lost_share,
                "without absent": one.lost_occurring_share,
                "share subnormal": one.subnormal / one.entries,
                "not finite": one.not_finite,
            }
            if library == "unitscale":
                own, other = both
                gain = _gain(other.lost_share, own.lost_share)
                apart = _gain(other.lost_occurring_share, own.lost_occurring_share)
                row |= {"times smaller": gain, "without absent times smaller": apart}
                row |= asked(gain, least=LEAST_GAIN[when])
            rows.append(row)
    return Table("Gradient entries that are zero in float16 and not in float32", rows)


def _gain(theirs: float, ours: float) -> float:
    """How many times smaller; nothing lost by them leaves nothing to be gained."""
    if not theirs:
        return float("nan")
    return theirs / ours if ours else float("inf")
