"""What is known of the results of plain operands: the number that all are, or what is not zero.

Of an array that is one number nothing is computed, and the size of a large one that is zero but for
a small one is read from that.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ._values import Value, aval_of

# Primitives that spread a constant over a shape: the result is the same constant.
_SPREADING = {"broadcast_in_dim", "reshape", "squeeze", "copy", "expand_dims"}
_FOLDED = {
    "mul": operator.mul,
    "add": operator.add,
    "add_any": operator.add,
    "sub": operator.sub,
}
# Primitives whose result has the elements of the operand, or their negatives, and no other.
_REARRANGING = _SPREADING | {"convert_element_type", "neg", "abs", "rev", "transpose"}


def result_of_plain(eqn: JaxprEqn, operands: Sequence[Value], data: Any) -> Value:
    """Returns the one result of plain operands, with what is known of it."""
    nonzero = _nonzero(eqn, operands)
    if nonzero is not None and jnp.result_type(nonzero.data) != jnp.result_type(data):
        nonzero = None
    const = _constant(eqn.primitive.name, operands, jnp.result_type(data))
    return Value(data, const=const, nonzero=nonzero)


def _constant(primitive: str, operands: Sequence[Value], dtype: Any) -> float | None:
    """The number that a result of constants is, where that matters: a moment starts at 0.9 * 0.

    So do cotangents that cancel: 1 + -1 where two paths of a difference meet.
    """
    known = [v.const for v in operands if v.const is not None]
    if primitive in _SPREADING and operands:
        return operands[0].const
    if primitive == "convert_element_type" and known:
        return _cast(known[0], dtype)
    if primitive == "neg" and known:
        return _cast(-known[0], dtype)
    if primitive not in _FOLDED or len(known) < len(operands):
        return None
    number = _FOLDED[primitive](*known)
    return number if number == 0 else None


def _cast(number: float, dtype: Any) -> float | None:
    """The number that a cast makes of a number; None where that is for XLA to say."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return number
    if jnp.issubdtype(dtype, jnp.bool_):
        return float(number != 0)
    if jnp.issubdtype(dtype, jnp.integer):
        held = math.isfinite(number) and jnp.iinfo(dtype).min <= number <= jnp.iinfo(dtype).max
        return number if held and number == int(number) else None
    with np.errstate(over="ignore"):
        return float(np.asarray(number).astype(dtype))


def _nonzero(eqn: JaxprEqn, operands: Sequence[Value]) -> Value | None:
    """What was scattered into zeros to make a result, such as the gradient of labels' logits."""
    if eqn.primitive.name in _REARRANGING:
        return operands[0].nonzero
    if eqn.primitive.name == "scatter-add" and operands[0].const == 0 and _writes_once(eqn):
        updates = operands[2]
        return updates.nonzero or (updates if jnp.size(updates.data) else None)
    return None


def _writes_once(eqn: JaxprEqn) -> bool:
    """Whether a scatter writes to no place twice: one index an item of a batch, or a promise."""
    batch = eqn.params["dimension_numbers"].scatter_indices_batching_dims
    others = (n for axis, n in enumerate(aval_of(eqn.invars[1]).shape[:-1]) if axis not in batch)
    return eqn.params["unique_indices"] or math.prod(others) == 1
