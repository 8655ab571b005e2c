"""The speeds of pipeline and step are tokens over seconds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from recipes.bench import _pipeline
from recipes.bench._pipeline import pipeline_speed
from recipes.gpt.config import GPTConfig


def test_speeds_are_tokens_over_seconds(
    make_config: Callable[..., GPTConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def step() -> None:
        nonlocal now
        now += 0.5

    clock = itertools.chain([0.0, 0.25, 0.5, 1.0], iter(lambda: now, None))
    # Not the clock of everyone: the pipeline's own threads read that too.
    monkeypatch.setattr(_pipeline, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(_pipeline, "stepper", lambda config: step)
    speed = pipeline_speed(make_config(), seconds=1.0)
    tokens = 4 * 16
    assert speed.given == 3 * tokens  # three batches in the second that the clock says
    assert speed.taken == 2 * tokens  # a step takes half a second
    assert speed.ratio == 1.5
