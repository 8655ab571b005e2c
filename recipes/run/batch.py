"""What a batch is."""

from __future__ import annotations

from typing import Any


def loss_inputs(batch: Any) -> tuple[Any, ...]:
    """What a model's `loss` takes of a batch.

    Args:
      batch: The tuple of those arrays; or one array of windows (batch, time + 1), which is the ids
        and, one further, the targets.
    """
    return batch if isinstance(batch, tuple) else (batch[:, :-1], batch[:, 1:])
