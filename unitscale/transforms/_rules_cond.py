"""cond and switch: every branch is scaled, and the branches agree on the form of each result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ..core._lazy_scale import Atom
from ._carry import Form, changing, crossing, enter
from ._interpreter import Interpreter
from ._registry import register
from ._settle import is_wide, ready, settle
from ._values import ONE, Value, data_dtype, is_complex, known_atoms, numeric, uniform


def _agreed(results: Sequence[Value], known: set[Atom]) -> Form:
    """Returns the form in which one result leaves all branches."""
    scaled = [v for v in results if v.scale is not None]
    if not scaled:
        return Form(None, jnp.result_type(results[0].data))
    if any(_goes_on(v) for v in scaled):
        return Form(ONE, data_dtype(*scaled), wide=True)
    scales = {v.scale for v in results if v.const != 0.0}
    scale = scales.pop() if len(scales) == 1 else None
    if scale is None or not set(scale.powers) <= known:
        return changing(data_dtype(*scaled))
    return Form(scale, data_dtype(*scaled))


def _goes_on(value: Value) -> bool:
    """Whether a chain of wide results does not end with a branch."""
    return is_wide(value) and not is_complex(value.data)


@register("control flow", "cond")
def cond(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """The same switch; a result that branches scale differently leaves with its scale."""
    index, *operands = values

    def results_of(branch: Any) -> list[Value]:
        results = Interpreter(interpreter.settings).run(branch.jaxpr, branch.consts, operands)
        return [v if _goes_on(v) else ready(settle(v)) for v in map(uniform, results)]

    found: list[list[Value]] = []

    def look(branch: Any) -> Callable[[], list[Any]]:
        def function() -> list[Any]:
            found.append(results_of(branch))
            return [v.data for v in found[-1]]

        return function

    for branch in eqn.params["branches"]:
        jax.make_jaxpr(look(branch))()
    known = known_atoms(operands)
    forms = [_agreed(results, known) for results in zip(*found, strict=True)]

    def leaving(branch: Any) -> Callable[[], list[Any]]:
        return lambda: crossing(results_of(branch), forms)

    chosen = numeric(index, np.int32)
    results = lax.switch(chosen, [leaving(b) for b in eqn.params["branches"]])
    return enter(list(results), forms)
