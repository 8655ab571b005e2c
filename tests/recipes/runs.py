"""Run training in the test's process, capture its output, and check resuming."""

import io
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from recipes import train as train_module
from recipes.config import RunConfig
from recipes.run.checkpoint import Checkpoints
from recipes.run.folder import Metrics, read_metrics
from recipes.run.probe import probe
from recipes.run.state import TrainState, formats, init_state, load_trained
from recipes.train import Outcome, train


def run(config: RunConfig, **options: Any) -> tuple[Outcome, str]:
    """Train a config; return the outcome and the output."""
    output = io.StringIO()
    outcome = train(config, console=Console(file=output, width=300), **options)
    return outcome, output.getvalue()


class _Later:
    """Arguments of `probe`, which is called only to find what is not finite."""

    def __init__(self, *args: Any):
        self.args = args

    def first_not_finite(self) -> str | None:
        return probe(*self.args).first_not_finite()


def without_plots(setattr: Callable[[Any, str, Any], None] = setattr) -> None:
    """Leave out plots and what they measure, which take most of the time of a tiny run."""
    setattr(train_module, "probe", _Later)
    for name in ("plot_loss", "plot_rms"):
        setattr(train_module, name, lambda *args, **options: None)


def untrained(config: RunConfig, folder: Path) -> TrainState:
    """Save the initial state of a run, without compiling a step; return the state."""
    checkpoints, state = Checkpoints(folder), init_state(config)[2]
    checkpoints.save(0, state, {}, {"formats": formats(config), "text": ""})
    checkpoints.close()
    return state


def loss_of(config: RunConfig, **options: Any) -> float:
    """Return the validation loss at the end of a run."""
    loss = run(config, **options)[0].validation_loss
    assert loss is not None
    return loss


def arrays(tree: Any) -> list[np.ndarray]:
    """Return the leaves of a tree; of random keys, their data."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    leaves = jax.tree.leaves(tree)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in leaves]


def final_arrays(config: RunConfig) -> list[np.ndarray]:
    """Return the state in a run's last checkpoint."""
    return arrays(load_trained(config, print)[1])


def timeless(folder: Path) -> list[dict]:
    """Return the metrics without those that depend on time."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.endswith("_per_second")} for row in rows]


def checksums(folder: Path, step: int) -> dict[str, list[Any]]:
    """Return dtype, shape and checksum of the arrays in a checkpoint, by name."""
    facts = folder / f"checkpoints/{step}/facts/metadata"
    return json.loads(facts.read_text("utf-8"))["arrays"]


class StopAfter(Metrics):
    """Send SIGTERM to this process after a step is logged."""

    step = 3

    def write(self, step: int, **values: float) -> None:
        super().write(step, **values)
        if step == self.step and "loss" in values:
            signal.raise_signal(signal.SIGTERM)


def resumes_bit_for_bit(whole: RunConfig, stopped: RunConfig) -> Outcome:
    """Check that a stopped and resumed run equals an uninterrupted one; return its outcome."""
    expected, _ = run(whole)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module.runs, "open_metrics", lambda _, folder, start: StopAfter(folder))
        outcome, said = run(stopped)
    assert (outcome.step, outcome.signal) == (4, signal.SIGTERM)
    assert "stopped by SIGTERM after step 4; run the same command to resume" in said
    assert signal.getsignal(signal.SIGTERM) == before

    resumed, said = run(stopped)
    assert f"resuming after step 4 of {whole.train.steps}" in said
    assert resumed.validation_loss == expected.validation_loss
    assert resumed.scores == expected.scores
    assert timeless(resumed.folder) == timeless(expected.folder)
    for one, other in zip(final_arrays(whole), final_arrays(stopped), strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()
    return expected
