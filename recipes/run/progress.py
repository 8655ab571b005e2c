"""How fast a run is, shown by a progress bar on a terminal and by plain lines elsewhere."""

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Stopwatch:
    """The speed of steps since it was last started."""

    def __init__(self, start: int):
        self.restart(start)

    def restart(self, done: int) -> None:
        """Counts from here on."""
        self._since, self._clock, self._paused = done, time.perf_counter(), 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time of a block out."""
        begin = time.perf_counter()
        yield
        self._paused += time.perf_counter() - begin

    def speed(self, done: int, per_step: int) -> float | None:
        """What was gone through in a second; None where no step was done since the start."""
        seconds = time.perf_counter() - self._clock - self._paused
        if done == self._since:
            return None
        return (done - self._since) * per_step / max(seconds, 1e-9)


class Reporter:
    """Says how a run goes."""

    def __init__(
        self, steps: int, start: int, per_step: int, console: Console, unit: str = "tokens"
    ):
        self._steps, self._per_step, self._console = steps, per_step, console
        self._unit = unit
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn(f"loss {{task.fields[loss]}}  {{task.fields[speed]}} {unit}/s"),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=console,
            )
            self._task = bar.add_task("train", total=steps, loss="-", speed="-")
            bar.update(self._task, completed=start)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, step: int) -> None:
        """Moves the bar; lines are left to `report`."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def report(self, step: int, loss: float, per_second: float | None) -> None:
        """Shows a loss and a speed, where that is known."""
        speed = "-" if per_second is None else f"{per_second:,.0f}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=f"{loss:.4f}", speed=speed)
            return
        left = ""
        if per_second is not None:
            seconds = (self._steps - step) * self._per_step / per_second
            left = f"  {speed} {self._unit}/s  {timedelta(seconds=round(seconds))} left"
        self.say(f"step {step}/{self._steps}  loss {loss:.4f}{left}")

    def say(self, message: str) -> None:
        """Prints a line above the bar."""
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)
