"""What 16 and 8 bits cost: validation loss against float32, and gradients lost in float16.

    python -m recipes bench parity --data TEXT

Trains `configs/gpt/parity.yaml` once for each policy, and the same GPT in plain `flax.nnx` in
float16, all with the same seed and data and none with a loss scale. A run that is complete in
`train.runs_dir` is used as it is, and one that was stopped is resumed.
"""

from typing import Any

from ._compare import compare, comparison
from ._runs import ConfigPath, DataPath, Fresh, Overrides, PlainRate, Seeds, Told
from ._table import JsonPath, Table, asked, publish
from ._underflow import WHEN, Sample, Underflow, lost_gradients

LEAST_GAIN = 10.0


def main(
    overrides: Overrides = None,
    config: ConfigPath = None,
    data: DataPath = None,
    plain_learning_rate: PlainRate = None,
    seeds: Seeds = None,
    fresh: Fresh = False,
    json: JsonPath = None,
) -> None:
    """Prints validation loss by number format, and the share of gradients lost in float16."""
    entry = comparison("parity")
    told = Told(config, overrides, seeds, fresh, data)
    found = compare(entry, told, entry.at_rate(plain_learning_rate))
    configs: dict[str, Any] = found.configs
    sample = Sample.of(configs["float32"])
    both = [lost_gradients(configs[name], sample) for name in ("float16", "plain-float16")]
    notes = [
        "No loss scale; loss over all validation text.",
        "Gradients: all parameters; both formats from the same float32 parameters. The end is that "
        f"of each library's own float16 run. {sample}",
    ]
    publish("parity", [found.table(), gradients(*both)], json, notes)


def gradients(ours: list[Underflow], theirs: list[Underflow]) -> Table:
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
                row |= asked(gain, least=LEAST_GAIN)
            rows.append(row)
    return Table("Gradient entries that are zero in float16 and not in float32", rows)


def _gain(theirs: float, ours: float) -> float:
    """How many times smaller; nothing lost by them leaves nothing to be gained."""
    if not theirs:
        return float("nan")
    return theirs / ours if ours else float("inf")
