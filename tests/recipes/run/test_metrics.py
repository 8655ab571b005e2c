"""Metrics can be read back, also after a crash and a resume."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from recipes.run.metrics import Metrics, read_metrics


class Listener:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.told.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


def test_file_and_logger_get_the_same(tmp_path: Path) -> None:
    listener = Listener()
    metrics = Metrics(tmp_path, listener)
    metrics.write(1, loss=2.5, speed=100.0)
    metrics.write(2, loss=1.5)
    metrics.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 2.5, "speed": 100.0},
        {"step": 2, "loss": 1.5},
    ]
    assert listener.told == [(1, {"loss": 2.5, "speed": 100.0}), (2, {"loss": 1.5})]
    assert listener.closed


def test_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.write(1, loss=2.5)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    metrics.close()


def test_resuming_drops_what_is_computed_again(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    for step in (1, 2, 3):
        metrics.write(step, loss=float(step))
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "lo\xff')  # the crash
    metrics = Metrics(tmp_path, resume_step=2)
    metrics.write(3, loss=30.0)
    metrics.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_no_metrics_yet(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_unwritable_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Metrics(tmp_path / "missing")
