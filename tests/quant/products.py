"""The three products of a layer, as the tests of strategies and of kernels run them."""

from collections.abc import Callable
from typing import Any

import jax

from unitscale.quant import Contraction, MatmulConfig, QuantState, Strategy, contract, is_stateful


def state_of(strategy: Strategy) -> QuantState | None:
    """The state that a strategy starts with, if it has one."""
    return QuantState.create(strategy) if is_stateful(strategy) else None


def three_products(config: MatmulConfig, spec: Contraction) -> Callable[..., Any]:
    """``(lhs, rhs, dy, state) -> (out, dlhs, drhs, what the state sees)``."""

    def run(lhs, rhs, dy, state=None):
        def forward(lhs, rhs, state):
            return contract(lhs, rhs, spec, config=config, state=state)

        y, vjp = jax.vjp(forward, lhs, rhs, state)
        return y, *vjp(dy)

    return run
