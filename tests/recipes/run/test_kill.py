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

from recipes import train as train_module
from recipes.cli import main
from recipes.registry import load_config
from recipes.run.folder import read_metrics
from recipes.run.processes import StopRequest

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


def rows(folder: Path) -> list[tuple[int, float | None, float | None]]:
    """Return the logged metrics, without speeds."""
    found = read_metrics(folder / "metrics.jsonl")
    return [(row["step"], row.get("loss"), row.get("validation_loss")) for row in found]


def arrays(folder: Path) -> dict[str, list]:
    """Return dtype, shape and checksum of the last checkpoint's arrays, by name."""
    steps = {int(path.name): path for path in (folder / "checkpoints").iterdir()}
    assert max(steps) == STEPS
    return json.loads((steps[STEPS] / "facts" / "metadata").read_text())["arrays"]


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
        while all(row[0] < step for row in rows(folder)):
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.02))  # between two lines, or while a checkpoint is written
        os.kill(child, number)
        # SIGTERM saves and ends with 143; a process that does not train yet just ends.
        assert ended() in ((-number,) if number == signal.SIGKILL else (-number, 128 + number))
    _, ended = start("stopped")
    assert ended() == 0
    assert rows(folder) == rows(runs / "whole")
    assert arrays(folder) == arrays(runs / "whole")


def test_the_first_signal_is_noted_and_the_second_acts() -> None:
    # Python's own handler of Ctrl-C, which a process that runs tests for another has not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with StopRequest() as stop:
        assert stop.signal is None
        signal.raise_signal(signal.SIGINT)
        assert stop.signal is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_a_stopped_process_saves(config_file: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "recipes", "train", str(config_file)]
    command += ["train={steps: 1000000, log_every: 1, checkpoint_every: 1000000}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, **pipes)
    assert process.stdout is not None
    for line in process.stdout:  # ends when the process does
        if line.startswith("step 3/"):
            process.send_signal(number)
            break
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number, err
    assert f"stopped by {number.name} after step" in out
    assert "run the same command to resume" in out
    (saved,) = (tmp_path / "runs" / "tiny" / "checkpoints").iterdir()
    assert int(saved.name) >= 3


@pytest.mark.parametrize(("saved", "said"), [(0, "nothing was trained"), (7, "step 7 is kept")])
def test_an_interruption_outside_of_the_loop_says_what_is_kept(
    config_file: Path,
    saved: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(config: object) -> None:
        raise KeyboardInterrupt

    if saved:
        (config_file.parent / f"runs/tiny/checkpoints/{saved}").mkdir(parents=True)
    monkeypatch.setattr(train_module, "recipe_of", interrupted)
    assert main(["train", str(config_file)]) == 130
    assert said in capsys.readouterr().err
