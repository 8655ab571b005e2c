"""Losses of the configs, and of a run of version 0.1.0, compared with stored numbers.

The comparison shows whether a change of code affects training. The stored numbers are from one
machine. On another machine, or with another XLA, float32 losses differ by less than the tolerance,
and losses with 8-bit matmuls by more.
"""

import json
import os
import random
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from recipes.registry import load_config
from recipes.run.folder import read_metrics
from recipes.train import train

from .conftest import TEXT
from .pretrained import FIXTURES
from .support import write_files

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STORED: dict[str, dict[str, float]] = json.loads(
    Path(__file__).with_name("losses.json").read_text(encoding="utf-8")
)
TRAINING = (
    "train={steps: 50, log_every: 10, eval_every: 50, eval_batches: 2, checkpoint_every: 50, "
    "sample_tokens: 0}",
)
WARM = "optimizer.warmup_steps=10"
TOKENIZER = FIXTURES / "bert-mlm" / "tokenizer.json"
SMALL = ("data.batch_size=16", "optimizer.learning_rate=0.002", "optimizer.b1=0.5")
RUNS: dict[str, tuple[str, ...]] = {
    # At its own rate one value that rounds the other way moves a loss by percents.
    "quickstart": (
        "gpt/quickstart",
        WARM,
        "optimizer.name=adamw",
        "optimizer.learning_rate=0.05",
        "data.batch_size=16",
        "data.tokenizer.kind=byte",
        "data.tokenizer.vocab=null",
        "model.layers=4",
    ),
    "parity": ("gpt/parity", WARM, "optimizer.learning_rate=1.5"),
    "books": (
        "bert/books",
        WARM,
        f"data.tokenizer={{kind: file, path: '{TOKENIZER}', vocab: null, lowercase: false}}",
    ),
    "charlm-unit": ("charlm/small", "optimizer.learning_rate=1.0"),
    "charlm-attention-sgd": (
        "charlm/small",
        "model.kind=attention",
        "optimizer.name=sgd",
        "optimizer.learning_rate=0.004",
    ),
    "mlp-fp8": ("mnist/mlp", *SMALL, "precision=scalify_fp8"),
    "cnn-plain": ("mnist/cnn", *SMALL),
}

# Of products in FP8: the quick start with another emitter of XLA, or unoptimized, is 1e-4 off.
TOLERANCE = {"quickstart": 1e-3, "mlp-fp8": 5e-3}


def write_text(path: Path) -> Path:
    """Draw words of a small vocabulary by Zipf's law, the same on every machine."""
    rng = random.Random(0)
    letters = "etaoinshrdlucmfwyp"
    words = ["".join(rng.choices(letters, k=rng.randint(1, 8))) for _ in range(400)]
    weights = [1 / rank for rank in range(1, 401)]
    drawn = rng.choices(words, weights, k=60_000)
    lines = [" ".join(drawn[start : start + 12]) for start in range(0, len(drawn), 12)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", RUNS)
def test_the_loss_is_the_stored_one(name: str, tmp_path: Path) -> None:
    path, *words = RUNS[name]
    if path.startswith("mnist"):
        data = [f"data.folder={write_files(tmp_path)}"]
    else:
        data = [f"data.path={write_text(tmp_path / 'text.txt')}"]
    own = ("name=run", f"train.runs_dir={tmp_path}")
    command = [sys.executable, "-m", "recipes", "train", f"configs/{path}.yaml"]
    # A process of its own, compiled as users' are: the tests' XLA flags round FP8 otherwise.
    subprocess.run(
        [*command, *TRAINING, *own, *words, *data],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": ""},
        check=True,
        capture_output=True,
    )
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    found: dict[str, Any] = {str(row["step"]): row["loss"] for row in rows if "loss" in row}
    assert found.keys() == STORED[name].keys()
    np.testing.assert_allclose(
        list(found.values()), list(STORED[name].values()), rtol=TOLERANCE.get(name, 1e-4)
    )


STOPPED = Path(__file__).with_name("run-0.1.0.tar.gz")
"""A run stopped at step 3 of 6: FP8 with delayed scales, 16- and 8-bit state, dropout."""
LOSSES = {4: 4.233809471130371, 5: 3.8667473793029785, 6: 3.680182695388794}
OPTIMIZED = True  # as that run was compiled


def test_a_run_of_0_1_0_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # its config names files beside it
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    with tarfile.open(STOPPED) as archive:
        archive.extractall("runs", filter="data")
    outcome = train(load_config("runs/old/config.yaml"), console=Console(quiet=True))
    assert outcome.step == 6
    rows = read_metrics(outcome.folder / "metrics.jsonl")
    found = {row["step"]: row["loss"] for row in rows if row["step"] in LOSSES and "loss" in row}
    assert found.keys() == LOSSES.keys()
    # Rounding to 8 bits makes more of what another processor rounds otherwise.
    np.testing.assert_allclose(list(found.values()), list(LOSSES.values()), rtol=5e-3)
