"""Recognizing functions whose rule is known, so that they need no simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from ._add import add
from ._elementwise import elementwise
from ._factors import Factors
from ._linear import matmul
from ._simulate import is_floating
from ._softmax import softmax

_ELEMENTWISE = frozenset(
    (
        *("abs", "add", "add_any", "and", "asin", "asinh", "atan", "atanh", "broadcast_in_dim"),
        *("cbrt", "clamp", "convert_element_type", "copy", "cos", "cosh", "custom_jvp_call", "div"),
        *("eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "ge", "gt", "integer_pow"),
        *("is_finite", "jit", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne"),
        *("neg", "not", "one_minus_square", "or", "pow", "rsqrt", "select_n", "sign", "sin"),
        *("sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh"),
    )
)
# What arrays are filled by, and a scalar is not, where the type stays.
_NONE_FOR_SCALARS = frozenset(("broadcast_in_dim", "convert_element_type"))


def closed_form(fn: Callable[..., Any], example: Sequence[Any]) -> Factors | None:
    """Returns the unconstrained factors of a function that a rule is known for, or None.

    Scaling:
        Known are matmul (of matrices), softmax, add, and every element-wise function of one array,
        which is recognized in its jaxpr and integrated (`elementwise`). All arguments must be
        floating, and numbers in an element-wise function must not come of its argument's shape.

    Args:
        fn: the function.
        example: its arguments, of which the shapes count.

    Returns:
        Factors with one backward factor per floating argument, or None.

    Example:
        >>> closed_form(jnp.matmul, [np.zeros((4, 16)), np.zeros((16, 64))])
        Factors(fwd=0.25, bwd=(0.125, 0.5))
        >>> round(closed_form(lambda x: jnp.tanh(x), [np.zeros(3)]).fwd, 3)
        1.593
        >>> closed_form(jnp.cumsum, [np.zeros(3)]) is None
        True

    References:
        Those of the rules.
    """
    if not all(map(is_floating, example)):
        return None
    shapes = [np.shape(x) for x in example]
    if fn in (jnp.matmul, jnp.dot, jax.lax.dot) and [len(s) for s in shapes] == [2, 2]:
        return matmul(shapes[0][0], shapes[0][1], shapes[1][1], constraint=None)
    if fn is jax.nn.softmax and len(shapes) == 1 and shapes[0]:
        return softmax(shapes[0][-1], constraint=None)
    if fn in (jnp.add, jax.lax.add) and len(shapes) == 2 and shapes[0] == shapes[1]:
        return add(constraint=None)
    if len(shapes) == 1 and _is_elementwise(fn, shapes[0]):
        try:
            return elementwise(fn, constraint=None)
        except (TypeError, ValueError):
            return None
    return None


def _is_elementwise(fn: Callable[..., Any], shape: tuple[int, ...]) -> bool:
    """Whether a function does to arrays of a shape what it does to scalars, which are integrated.

    A number in it may come of the shape, so the two programs of its value and slope are compared.
    """
    known: dict[tuple[Any, ...], int] = {("argument",): 0, ("its change",): 1}
    try:
        whole, one = (_numbered(_value_and_slope(fn, s), [0, 1], s, known) for s in (shape, ()))
    except Exception:  # whatever the function raises here, no rule is known for it
        return False
    return whole == one


def _value_and_slope(fn: Callable[..., Any], shape: tuple[int, ...]) -> ClosedJaxpr:
    x = jax.ShapeDtypeStruct(shape, np.float32)
    return jax.make_jaxpr(lambda x, change: jax.jvp(fn, (x,), (change,)))(x, x)


def _numbered(
    closed: ClosedJaxpr,
    operands: list[int],
    shape: tuple[int, ...],
    known: dict[tuple[Any, ...], int],
) -> list[int]:
    """Returns numbers of a program's results: equal where element-wise operations and operands are.

    Args:
        closed: the program.
        operands: the numbers of its arguments.
        shape: of all its arrays that are not scalars.
        known: the numbers that there are, by what they stand for; new ones are added.

    Raises:
        TypeError: if the program is not element-wise.
    """

    def number(*term: Any) -> int:
        return known.setdefault(term, len(known))

    def constant(value: Any) -> int:
        value = np.asarray(value)
        return number(value.dtype, value.tobytes())

    env = dict(zip(closed.jaxpr.invars, operands, strict=True))
    env |= {v: constant(c) for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True)}

    def read(atom: Any) -> int:
        if getattr(atom.aval, "shape", None) not in ((), shape):
            raise TypeError(f"an array of another shape: {atom.aval}")
        if isinstance(atom, Literal):
            return constant(np.asarray(atom.val, _dtype(atom)))
        return env[atom]

    for eqn in closed.jaxpr.eqns:
        name, numbers = eqn.primitive.name, [read(atom) for atom in eqn.invars]
        if name not in _ELEMENTWISE:
            raise TypeError(f"not element-wise: {name}")
        inner = [value for value in eqn.params.values() if isinstance(value, ClosedJaxpr)]
        if inner:
            numbers = _numbered(inner[0], numbers, shape, known)
        elif name not in _NONE_FOR_SCALARS or _dtype(eqn.invars[0]) != _dtype(eqn.outvars[0]):
            numbers = [number(name, str(eqn.params), *numbers)]
        env.update(zip(eqn.outvars, numbers, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _dtype(atom: Any) -> Any:
    return atom.aval.dtype
