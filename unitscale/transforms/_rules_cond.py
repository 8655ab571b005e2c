"""cond and switch: every branch is scaled, and the branches agree on the form of each result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from ._carry import Form, changing, crossing, enter
from ._interpreter import Interpreter
from ._lazy_scale import Atom
from ._packing import Traced, pack, trace
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
    packed = pack(operands)
    # Once each, however deep branches lie in branches: what follows copies their jaxprs.
    branches = [trace(interpreter.settings, b, packed) for b in eqn.params["branches"]]

    def results_of(branch: Traced) -> list[Value]:
        arrays = jaxpr_as_fun(branch.closed)(*packed.arrays)
        results = branch.rebuild(arrays, packed.atoms, operands)
        return [v if _goes_on(v) else ready(settle(v)) for v in map(uniform, results)]

    found: list[list[Value]] = []

    def look(branch: Traced) -> Callable[[], list[Any]]:
        def function() -> list[Any]:
            found.append(results_of(branch))
            return [v.data for v in found[-1]]

        return function

    for branch in branches:
        jax.make_jaxpr(look(branch))()
    known = known_atoms(operands)
    forms = [_agreed(results, known) for results in zip(*found, strict=True)]

    def leaving(branch: Traced) -> Callable[[], list[Any]]:
        return lambda: crossing(results_of(branch), forms)

    results = lax.switch(numeric(index, np.int32), [leaving(b) for b in branches])
    return enter(list(results), forms)
