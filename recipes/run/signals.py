"""Ctrl-C and SIGTERM as a request that the training loop answers between two steps."""

import signal
import threading
from types import FrameType
from typing import Any, Self


class StopRequest:
    """Within its block, the first SIGINT or SIGTERM is noted; a second acts as it always does.

    `signal` is None, or the signal that came; a shell expects exit code 128 + its number.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others get no signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
