"""Two processes train one run: as one would, with one voice, and again after one was lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from recipes import processes
from recipes.configfile import load_config
from recipes.errors import RecipeError
from recipes.metrics import read_metrics
from recipes.processes import Processes, SharedError

ROOT = Path(__file__).parents[2]
TIMEOUT = 240  # seconds; a busy machine takes a while to import
STEPS = 12
SETTINGS = [
    "mesh.data=2",
    "model.dropout=0.0",  # its draws depend on where the rows of a batch lie
    f"train.steps={STEPS}",
    "train.checkpoint_every=1",
    "train.eval_every=5",
]

# The command line, without plots, which take most of the time of so small a run.
COMMAND = """
import sys
from recipes import cli, train
train.plot_run = lambda run: None
sys.exit(cli.main(["train", *sys.argv[1:]]))
"""


class Ended(NamedTuple):
    code: int
    output: str
    errors: str


class Pair:
    """The same command in two processes, each with one device."""

    def __init__(self, config: Path, words: list[str], own: tuple[list[str], list[str]]) -> None:
        environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()} | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_COMPILATION_CACHE_DIR": str(config.with_name("compiled")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": str(ROOT),
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", COMMAND, str(config), *SETTINGS, *words, *own[index]],
                env=environment | {"JAX_PROCESS_ID": str(index)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(2)
        ]

    def end(self, index: int) -> Ended:
        process = self.processes[index]
        output, errors = process.communicate(timeout=TIMEOUT)
        said = [line for line in output.splitlines() if not line.startswith("[Gloo]")]
        return Ended(process.returncode, "\n".join(said), errors)

    def ends(self) -> list[Ended]:
        return [self.end(index) for index in range(2)]


Start = Callable[..., Pair]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def start(config_file: Path) -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def start(*words: str, own: tuple[list[str], list[str]] = ([], [])) -> Pair:
        pair = Pair(config_file, list(words), own)
        running.extend(pair.processes)
        return pair

    yield start
    for one in running:
        one.kill()
        one.communicate()


def losses(folder: Path) -> list[tuple]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [(row["step"], row.get("loss"), row.get("validation_loss")) for row in rows]


def saved(folder: Path) -> list[int]:
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdigit())


@pytest.mark.slow
def test_lost_processes(start: Start, config_file: Path) -> None:
    """One is killed, later one falls silent, later the first is killed: nothing else changes."""
    runs = Path(load_config(config_file).train.runs_dir)
    whole = start("name=whole").ends()
    assert [one.code for one in whole] == [0, 0], whole
    assert "validation loss" in whole[0].output
    assert whole[1].output == ""  # one voice
    folder = runs / "lost"
    blows = ((3, 1, signal.SIGKILL), (6, 1, signal.SIGSTOP), (9, 0, signal.SIGKILL))
    for step, victim, blow in blows:
        pair = start("name=lost", "--heartbeat", "5")
        while all(row[0] < step for row in losses(folder)):
            assert pair.processes[victim].poll() is None, pair.ends()
            time.sleep(0.001)
        before = saved(folder)
        pair.processes[victim].send_signal(blow)
        left = pair.end(1 - victim)
        assert left.code not in (0, -signal.SIGKILL)
        # Ours; or that of JAX, where it is faster, or nothing else notices.
        assert "no longer answers" in left.errors or "another task died" in left.errors
        pair.processes[victim].kill()
        assert pair.end(victim).code == -signal.SIGKILL
        assert saved(folder)[-1] >= before[-1] > 0
    ended = start("name=lost").ends()
    assert [one.code for one in ended] == [0, 0], ended
    assert losses(folder) == losses(runs / "whole")
    assert saved(folder) == [STEPS - 1, STEPS]
