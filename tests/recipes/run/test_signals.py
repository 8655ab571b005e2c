"""Ctrl-C and SIGTERM, sent to a real process, leave a checkpoint and the way to go on."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.run.signals import StopRequest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler of Ctrl-C, which a process that runs tests for another has not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_the_first_signal_is_noted_and_the_second_acts() -> None:
    with StopRequest() as stop:
        assert stop.signal is None
        signal.raise_signal(signal.SIGINT)
        assert stop.signal is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_a_stopped_process_saves(config_file: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "recipes", "train", str(config_file)]
    command += ["train={steps: 1000000, log_every: 1, checkpoint_every: 1000000}"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
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
