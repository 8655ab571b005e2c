"""kill -9 at any moment, and the same command again: the run that was never interrupted."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from recipes.registry import load_config
from recipes.run.metrics import read_metrics

ROOT = Path(__file__).parents[2]
STEPS = 12
SETTINGS = [
    f"train.steps={STEPS}",
    "train.log_every=1",
    "train.checkpoint_every=1",
    "train.eval_every=5",
]

# Trains as the command line does, without plots, which take most of the time of so small a run.
TRAIN = """
import sys
from recipes import train
from recipes.registry import load_config
train.plot_run = lambda run: None
outcome = train.train(load_config(sys.argv[1], sys.argv[2:]))
print("final", outcome.validation_loss.hex())
"""


@pytest.fixture
def start(config_file: Path, tmp_path: Path):
    """Starts a run of a name in a process of its own; a checkpoint is written after each step."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
    }
    running = []

    def start(name: str) -> subprocess.Popen[str]:
        words = [str(config_file), f"name={name}", *SETTINGS]
        command = [sys.executable, "-c", TRAIN, *words]
        log = (tmp_path / f"{name}.log").open("a")
        one = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
        log.close()
        running.append(one)
        return one

    yield start
    for one in running:
        one.kill()
        one.wait()
        if one.stdout is not None:
            one.stdout.close()


def losses(folder: Path) -> list[tuple]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [(row["step"], row.get("loss"), row.get("validation_loss")) for row in rows]


def final(one: subprocess.Popen[str]) -> str:
    output, _ = one.communicate()
    assert one.returncode == 0, output
    return next(line for line in output.splitlines() if line.startswith("final"))


@pytest.mark.slow
def test_killed_and_started_again(start, config_file: Path, tmp_path: Path) -> None:
    """Killed a random while after a random step is logged: often, a checkpoint is being written."""
    expected = final(start("whole"))
    draw = random.Random(0)
    runs = Path(load_config(config_file).train.runs_dir)
    folder, killed = runs / "killed", 0
    for first in (1, 4, 8):
        one = start("killed")
        step, wait = draw.randint(first, first + 2), draw.uniform(0, 0.05)
        while one.poll() is None and all(row[0] < step for row in losses(folder)):
            time.sleep(0.001)
        time.sleep(wait)
        one.send_signal(signal.SIGKILL)
        one.communicate()
        killed += one.returncode == -signal.SIGKILL
    assert killed == 3
    assert final(start("killed")) == expected
    assert losses(folder) == losses(runs / "whole")
    left = [path.name for path in (folder / "checkpoints").iterdir()]
    assert sorted(left, key=int) == [str(STEPS - 1), str(STEPS)]
    assert np.isfinite([row[1] for row in losses(folder) if row[1] is not None]).all()
