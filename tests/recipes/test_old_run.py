"""Resuming a run that version 0.1.0 stopped, to the loss that 0.1.0 would have reached."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from recipes.registry import load_config
from recipes.run.folder import read_metrics
from recipes.train import train

from .conftest import TEXT

STOPPED = Path(__file__).with_name("run-0.1.0.tar.gz")
"""A run stopped at step 3 of 6: FP8 with delayed scales, 16- and 8-bit state, dropout."""
LOSSES = {4: 4.233809471130371, 5: 3.8667473793029785, 6: 3.680182695388794}
pytestmark = pytest.mark.slow
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
