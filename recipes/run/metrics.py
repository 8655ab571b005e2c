"""Numbers of a run: one JSON object per line, and the same to the logger of the config."""

import json
from pathlib import Path
from typing import Any

from ..atomic import write_whole
from ..config import RunConfig
from .loggers import Logger, NoLogger, open_logger
from .processes import is_first


class Metrics:
    """Appends to `metrics.jsonl`, and writes to a logger."""

    def __init__(self, folder: Path, logger: Logger | None = None, *, resume_step: int = 0):
        path = folder / "metrics.jsonl"
        kept = [row for row in read_metrics(path) if row["step"] <= resume_step]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._lines = path.open("a", encoding="utf-8")
        self._logger = NoLogger() if logger is None else logger

    def write(self, step: int, **values: float) -> None:
        """Records values by name at a step (steps done so far)."""
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        self._lines.flush()
        self._logger.write(step, values)

    def close(self) -> None:
        self._lines.close()
        self._logger.close()


class NoMetrics(Metrics):
    """What a process has that leaves writing to another."""

    def __init__(self) -> None:
        pass

    def write(self, step: int, **values: float) -> None:
        pass

    def close(self) -> None:
        pass


def open_metrics(config: RunConfig, folder: Path, resume_step: int) -> Metrics:
    """The metrics of a run that goes on after a step; of several processes the first writes."""
    if not is_first():
        return NoMetrics()
    return Metrics(folder, open_logger(config, folder, resume_step), resume_step=resume_step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a last line cut short by a crash is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
