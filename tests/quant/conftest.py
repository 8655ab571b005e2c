"""What the tests of quantized products share: quick compilation."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs are compiled often here and run once each; for an H200 they are only read."""
    quick = not request.module.__name__.endswith("test_h200")
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
