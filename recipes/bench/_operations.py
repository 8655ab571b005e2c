"""How many operations a program is made of, counted in its jaxpr, and a step to count them in."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Jaxpr

from unitscale import as_scaled, scalify

from ..describe import inner_programs
from ._table import Table

LAYERS, WIDTH, ROWS = 8, 64, 32
MOST_SCALARS, MOST_ARRAYS = 250, 1.25


class Operations(NamedTuple):
    """Numbers of operations: on scalars alone, and with an array among operands or results."""

    scalars: int
    arrays: int


def operations(program: Callable[..., Any], *args: Any) -> Operations:
    """Counts the operations of a program; those of a loop's body once."""
    scalars = arrays = 0
    for eqn in _equations(jax.make_jaxpr(program)(*args).jaxpr):
        if any(jnp.shape(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
            arrays += 1
        else:
            scalars += 1
    return Operations(scalars, arrays)


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        inner = inner_programs(eqn)
        for program in inner:
            yield from _equations(getattr(program, "jaxpr", program))
        if not inner:
            yield eqn


def adam_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of Adam on an MLP with biases and tanh, and its arguments."""
    rng, tx = np.random.default_rng(0), optax.adam(1e-3)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        *hidden, (weight, bias) = params
        for w, b in hidden:
            x = jnp.tanh(x @ w + b)
        return jnp.mean((x @ weight + bias - y) ** 2)

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
        updates, state = tx.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    params = [(normal(WIDTH, WIDTH) / WIDTH**0.5, jnp.zeros(WIDTH)) for _ in range(LAYERS)]
    return step, (params, tx.init(params), normal(ROWS, WIDTH), normal(ROWS, WIDTH))


def counted() -> Table:
    """Operations of the step, plain and scalified."""
    step, (*held, x, y) = adam_step()
    plain = operations(step, *held, x, y)
    rows: list[dict[str, Any]] = [{"program": "plain", **plain._asdict()}]
    for dtype in (jnp.float32, jnp.float16):
        name = f"scalify {np.dtype(dtype).name}"
        found = operations(scalify(step), *as_scaled(held, dtype=dtype), x, y)
        over = found.arrays / plain.arrays
        row = {"program": name, **found._asdict(), "arrays over plain": over}
        if dtype == jnp.float32:
            row |= {"within": found.scalars <= MOST_SCALARS and over <= MOST_ARRAYS}
            row |= {"asked": f"<= {MOST_SCALARS}; <= {MOST_ARRAYS}"}
        rows.append(row)
    return Table(f"Operations of a step of Adam, MLP of {LAYERS} layers", rows)
