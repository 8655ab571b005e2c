"""Measure the RMS of every tensor of a GPT before its first step, in plain Flax and in unitscale.

python notebooks/measure_rms.py shakespeare.txt    # writes notebooks/results/rms.json
"""

import datetime
import json
import sys
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np

from recipes.gpt.config import GPTConfig
from recipes.gpt.task import build
from recipes.recipe import loss_inputs, recipe_of
from recipes.run.probe import probe

RESULTS = Path(__file__).parent / "results"
KINDS = {
    "activations": "outputs of layers",
    "gradients": "gradients at outputs",
    "weights": "gradients of parameters",
}


def main(text: str) -> None:
    """Write `results/rms.json`."""
    shape = {"layers": 8, "width": 256, "heads": 8, "vocab": 256}
    data = {"path": text, "sequence_length": 128, "batch_size": 16}
    tree = {"name": "rms", "precision": {"policy": "float32"}, "model": shape, "data": data}
    unit = GPTConfig.model_validate(tree)
    tree |= {"model": {**shape, "library": "plain"}, "optimizer": {"umup": False}}
    windows, rows = next(recipe_of(unit).load_data(unit).validation(1)), []
    for name, config in (("plain flax.nnx", GPTConfig.model_validate(tree)), ("unitscale", unit)):
        reading = probe(build(config), *loss_inputs(windows))
        for kind, label in KINDS.items():
            found = np.log2([float(v) for v in getattr(reading, kind).values() if v > 0])
            values = [round(float(x), 4) for x in found]
            row = {"tensors": label, "model": name, "count": len(values), "least": min(values)}
            row |= {"greatest": max(values), "below E4M3": int((found < -9).sum())}
            rows.append(row | {"log2 of RMS": values})
    title = "RMS of the tensors of a GPT, 8 layers of 256, on 16 x 128 bytes of text, as log2"
    document = {"benchmark": "rms", "command": "python notebooks/measure_rms.py shakespeare.txt"}
    document |= {"date": datetime.date.today().isoformat(), "machine": jax.devices()[0].device_kind}
    document |= {"versions": {name: version(name) for name in ("jax", "flax")}}
    document |= {"tables": [{"title": title, "rows": rows}], "notes": []}
    (RESULTS / "rms.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
