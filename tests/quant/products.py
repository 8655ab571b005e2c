"""The three matmuls of a layer, for tests of strategies and kernels."""

from collections.abc import Callable
from typing import Any

import jax

from unitscale.quant import Contraction, MatmulConfig, QuantState, Strategy, contract, is_stateful


def state_of(strategy: Strategy) -> QuantState | None:
    """Return the initial state of a strategy, if it has one."""
    return QuantState.create(strategy) if is_stateful(strategy) else None


def three_products(config: MatmulConfig, spec: Contraction) -> Callable[..., Any]:
    """Make a function `(lhs, rhs, dy, state) -> (out, dlhs, drhs, gradient of the state)`."""

    def run(lhs, rhs, dy, state=None):
        def forward(lhs, rhs, state):
            return contract(lhs, rhs, spec, config=config, state=state)

        y, vjp = jax.vjp(forward, lhs, rhs, state)
        return y, *vjp(dy)

    return run
