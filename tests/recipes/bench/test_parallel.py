"""`bench parallel`: bytes and errors by format, training, and the command on too few devices."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from recipes.bench import parallel
from recipes.cli import main
from recipes.errors import RecipeError


def test_bytes_and_errors() -> None:
    rows = {row["exchange"]: row for row in parallel.exchange((64, 32)).rows}
    full = rows["float32"]["bytes per entry"]
    assert full == 2 * 4 * 7 / 8
    for dtype, share in [("bfloat16", 0.5), ("float8_e4m3fn", 0.25), ("float8_e5m2", 0.25)]:
        assert share <= rows[dtype]["over float32"] < share + parallel.SCALAR / full / (64 * 32)
        assert rows[dtype]["within"]
    assert rows["float32"]["heavy-tailed, nearest"] < 1e-6
    assert 0.01 < rows["float8_e4m3fn"]["heavy-tailed, nearest"] <= parallel.MOST_ERROR


def test_losses_are_compared_with_float32() -> None:
    rows = parallel.compare({"float32": 2.0, "float8_e4m3fn": 1.98}).rows
    assert rows[1]["over float32"] == pytest.approx(-0.01)
    assert not rows[1]["within"]


@pytest.mark.slow
def test_command_trains(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "SHAPE", (64, 32))
    out = tmp_path / "out.json"
    words = [
        "--train",
        "--config",
        str(config_file),
        "--json",
        str(out),
        "train.steps=20",
        "model.dropout=0.0",
    ]
    assert main(["bench", "parallel", *words]) == 0
    rows = json.loads(out.read_text("utf-8"))["tables"][1]["rows"]
    losses = [row["validation loss"] for row in rows]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_command_starts_itself_again_on_too_few_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(command: list[str], env: dict[str, str], check: bool) -> SimpleNamespace:
        calls.append((command[1:], env["XLA_FLAGS"], env["JAX_PLATFORMS"]))
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(parallel, "DEVICES", len(jax.devices()) + 1)
    monkeypatch.setattr(parallel.subprocess, "run", run)
    monkeypatch.setitem(os.environ, "XLA_FLAGS", "--xla_other")
    assert main(["bench", "parallel", "--data", "text", "seed=1"]) == 3
    ((words, flags, platform),) = calls
    assert words[:5] == ["-m", "recipes", "bench", "parallel", "seed=1"]
    assert words[words.index("--data") + 1] == "text"
    assert flags == f"--xla_other --xla_force_host_platform_device_count={parallel.DEVICES}"
    assert platform == "cpu"
    monkeypatch.setitem(os.environ, "XLA_FLAGS", flags)
    with pytest.raises(RecipeError, match="this benchmark needs"):
        parallel.main()
