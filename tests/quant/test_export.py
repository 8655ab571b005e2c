"""Scales that are kept, in programs that `jax.export` writes to bytes."""

import pytest

from tests.exported import assert_is_read_again
from unitscale.quant import Delayed, QuantState, Static


@pytest.mark.parametrize("strategy", [Delayed(history=3, use="latest"), Static()], ids=str)
def test_scales_that_are_kept(strategy: Delayed | Static) -> None:
    assert_is_read_again(QuantState.create(strategy))
