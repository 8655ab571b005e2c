"""A run that is killed at any moment and restarted ends like an uninterrupted one."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recipes.registry import load_config

from ..runs import checksums, timeless

ROOT = Path(__file__).parents[3]
STEPS, RESTARTS = 400, 30
# Log lines, checkpoints and validations never come together but by chance.
EVERY = f"train={{steps: {STEPS}, log_every: 10, checkpoint_every: 7, eval_every: 33}}"

# Starts runs by fork: everything is imported once, and no device has been touched before.
NURSERY = """
import json, os, sys
from recipes import train
from recipes.registry import load_config
from tests.recipes.runs import without_plots
without_plots()
for line in sys.stdin:
    path, *words = json.loads(line)
    child = os.fork()
    if not child:
        outcome = train.train(load_config(path, words))
        sys.stdout.flush()
        os._exit(128 + outcome.signal if outcome.signal else 0)
    print("child", child, flush=True)
    _, status = os.waitpid(child, 0)
    print("ended", os.waitstatus_to_exitcode(status), flush=True)
"""

Start = Callable[[str], tuple[int, Callable[[], int]]]


@pytest.fixture
def start(config_file: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a run in a process; return its id and a function that waits for its exit code."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (tmp_path / "log").open("w") as log:
        nursery = subprocess.Popen(
            [sys.executable, "-c", NURSERY],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    told, asked = nursery.stdout, nursery.stdin

    def read(word: str) -> int:
        for line in told:
            if line.startswith(word):
                return int(line.split()[1])
        raise AssertionError((tmp_path / "log").read_text())

    def start(name: str) -> tuple[int, Callable[[], int]]:
        asked.write(json.dumps([str(config_file), f"name={name}", EVERY]) + "\n")
        asked.flush()
        return read("child"), lambda: read("ended")

    yield start
    nursery.kill()
    nursery.communicate()
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_stopped_and_started_again_it_is_the_run_never_stopped(
    start: Start, config_file: Path
) -> None:
    runs = Path(load_config(config_file).train.runs_dir)
    _, ended = start("whole")
    assert ended() == 0
    draw, folder = random.Random(0), runs / "stopped"
    for restart in range(RESTARTS):
        number = (signal.SIGKILL, signal.SIGTERM)[restart % 2]
        child, ended = start("stopped")
        step = STEPS * (restart + 1) // (RESTARTS + 4) - draw.randrange(10)
        while all(row["step"] < step for row in timeless(folder)):
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.02))  # between two lines, or while a checkpoint is written
        os.kill(child, number)
        # SIGTERM saves and ends with 143; a process that does not train yet just ends.
        assert ended() in ((-number,) if number == signal.SIGKILL else (-number, 128 + number))
    _, ended = start("stopped")
    assert ended() == 0
    assert timeless(folder) == timeless(runs / "whole")
    assert checksums(folder, STEPS) == checksums(runs / "whole", STEPS)
