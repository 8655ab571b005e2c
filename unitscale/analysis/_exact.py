"""Programs in float64, with rounding taken out.

A program of any policy is a function of real numbers plus rounding. Evaluating its jaxpr in float64
with every cast between floating types an identity gives that function, so that two gradients of it
can be compared to many digits, whatever the formats.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ..core import scan_counts
from ._graph import inner_jaxpr, is_float

WIDE = jnp.float64


def wide(x: Any) -> Any:
    """Returns an array in float64 if it is floating, and as it is if not.

    Example:
        >>> with jax.enable_x64(True):
        ...     print(wide(np.float16(1)).dtype, wide(np.int32(1)).dtype)
        float64 int32
    """
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return x
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return x
    return lax.convert_element_type(x, WIDE) if jnp.issubdtype(dtype, jnp.floating) else x


def types_of(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Returns plain types of avals, as `jax.make_jaxpr` takes them.

    Example:
        >>> types_of([jax.ShapeDtypeStruct((2,), "float16")])[0].dtype.name
        'float16'
    """
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]


Watch = Callable[[tuple[int, ...], Any, list[Any]], None]


def evaluate(closed: ClosedJaxpr, *args: Any, watch: Watch | None = None) -> list[Any]:
    """Evaluates a program in float64 without rounding; call it under `jax.enable_x64(True)`.

    Functions with a custom_vjp are replaced by their forward bodies, so that differentiating the
    result gives the true derivative. Casts, `reduce_precision`, `core.cast` and `core.dithered` are
    identities. Operations on the bits of floating numbers see them in the type that the program
    stores.

    Args:
        closed: the program.
        *args: its flat arguments, of any floating type.
        watch: called with the path (as in `Graph.calls`), equation and operands of each custom_vjp
            function; of a loop's first iteration, and of every branch.

    Returns:
        Its flat results, floating ones in float64.

    Example:
        >>> closed = jax.make_jaxpr(lambda x: x.astype(jnp.float16) * 2)(1.0)
        >>> with jax.enable_x64(True):
        ...     print(evaluate(closed, 0.1)[0])
        0.2
    """
    return _Evaluator(watch, ()).run(closed.jaxpr, closed.consts, args)


class _Evaluator:
    def __init__(self, watch: Watch | None, path: tuple[int, ...]):
        self.watch, self.path = watch, path

    def inside(self, *index: int) -> "_Evaluator":
        return _Evaluator(self.watch, (*self.path, *index))

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            return _literal(atom) if isinstance(atom, Literal) else env[atom]

        for var, value in (
            *zip(jaxpr.constvars, consts, strict=True),
            *zip(jaxpr.invars, args, strict=True),
        ):
            env[var] = wide(jnp.asarray(value) if isinstance(value, float | int) else value)
        for index, eqn in enumerate(jaxpr.eqns):
            rule = _RULES.get(eqn.primitive.name, _default)
            results = rule(self.inside(index), eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def _literal(atom: Literal) -> Any:
    aval: Any = atom.aval
    return np.asarray(atom.val, WIDE if is_float(aval) else aval.dtype)


def _default(at: _Evaluator, eqn: Any, operands: list[Any]) -> list[Any]:
    inner = inner_jaxpr(eqn)
    if inner is not None and _is_dithered(inner):
        return operands
    if inner is not None and eqn.primitive.name not in _OPAQUE:
        consts = getattr(next(iter(_closed(eqn)), None), "consts", ())
        return at.run(inner, consts, operands)
    params = {name: _wide_param(value) for name, value in eqn.params.items()}
    if "precision" in params:
        params["precision"] = None  # it may ask for operands to be rounded
    try:
        results = _bind(eqn, operands, params)
    except (TypeError, ValueError, NotImplementedError):
        # An operation that has no float64 form takes and gives the types of the program.
        results = _bind(eqn, _stored(eqn, operands), eqn.params)
    return [wide(r) for r in results]


_OPAQUE = {"pallas_call"}


def _closed(eqn: Any) -> list[ClosedJaxpr]:
    return [value for value in eqn.params.values() if isinstance(value, ClosedJaxpr)]


def _bind(eqn: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return list(results) if eqn.primitive.multiple_results else [results]


def _wide_param(value: Any) -> Any:
    if isinstance(value, np.dtype | type):
        try:
            return np.dtype(WIDE) if jnp.issubdtype(value, jnp.floating) else value
        except TypeError:
            return value
    return value


def _stored(eqn: Any, operands: list[Any]) -> list[Any]:
    return [
        lax.convert_element_type(x, atom.aval.dtype) if is_float(atom.aval) else x
        for x, atom in zip(operands, eqn.invars, strict=True)
    ]


def _identity(at: _Evaluator, eqn: Any, operands: list[Any]) -> list[Any]:
    return [operands[0]]


def _convert(at: _Evaluator, eqn: Any, operands: list[Any]) -> list[Any]:
    (x,), (var,) = operands, eqn.outvars
    if is_float(eqn.invars[0].aval) and is_float(var.aval):
        return [x]
    return [wide(lax.convert_element_type(x, var.aval.dtype))]


def _bits(at: _Evaluator, eqn: Any, operands: list[Any]) -> list[Any]:
    return [wide(r) for r in _bind(eqn, _stored(eqn, operands), eqn.params)]


def _custom_vjp(at: _Evaluator, eqn: Any, operands: list[Any]) -> list[Any]:
    if is_cast(eqn):
        return [operands[0]]
    if at.watch is not None:
        at.watch(at.path, eqn, operands)
    closed = eqn.params["call_jaxpr"]
    return _UNSEEN.run(closed.jaxpr, closed.consts, operands)


_UNSEEN = _Evaluator(None, ())


def has_while(jaxpr: Jaxpr) -> bool:
    """Whether a program, or one inside of it, has a loop that ends as its values tell.

    Example:
        >>> has_while(jax.make_jaxpr(lambda n: lax.fori_loop(0, n, lambda i, c: c + i, 0))(3).jaxpr)
        True
    """
    return any(
        eqn.primitive.name == "while" or any(has_while(c.jaxpr) for c in _closed(eqn))
        for eqn in jaxpr.eqns
    )


def is_cast(eqn: Any) -> bool:
    """Whether an equation is `unitscale.cast`: rounding, whose own rule is the identity.

    Example:
        >>> from unitscale import cast
        >>> is_cast(jax.make_jaxpr(lambda x: cast(x, "E4M3"))(1.0).eqns[-1])
        True
    """
    return (
        eqn.primitive.name == "custom_vjp_call"
        and eqn.params["call_jaxpr"].jaxpr.debug_info.func_name == "_cast"
        and len(eqn.outvars) == 1
        and eqn.outvars[0].aval.shape == eqn.invars[0].aval.shape
    )


def _is_dithered(inner: Jaxpr) -> bool:
    """Whether a program is that of `core.dithered`, and not what differentiation leaves of it."""
    types = [var.aval for var in (*inner.invars, *inner.outvars)]
    return (
        inner.debug_info.func_name == "_dithered" and len(types) == 2 and all(map(is_float, types))
    )


def _custom_jvp(at: _Evaluator, eqn: Any, operands: list[Any]) -> list[Any]:
    """Keeps the rule of the function, as that of relu at zero."""
    closed = eqn.params["call_jaxpr"]
    if closed.jaxpr.debug_info.func_name == "_differentiated_once":
        return at.run(closed.jaxpr, closed.consts, operands)  # not rounded, it may be here
    _, rule = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
    avals = types_of([atom.aval for atom in eqn.invars])
    floats = [i for i, aval in enumerate(avals) if is_float(aval)]
    outputs = [is_float(var.aval) for var in eqn.outvars]

    def derivative(*arrays: Any) -> list[Any]:
        given = dict(zip(floats, arrays[len(avals) :], strict=True))
        tangents = [given[i] if i in given else _float0(a.shape) for i, a in enumerate(avals)]
        found = rule.call_wrapped(*arrays[: len(avals)], *tangents)
        return [t for t, flag in zip(found[len(outputs) :], outputs, strict=True) if flag]

    linear = jax.make_jaxpr(derivative)(*avals, *(avals[i] for i in floats))
    function = jax.custom_jvp(lambda *xs: _UNSEEN.run(closed.jaxpr, closed.consts, xs))

    @function.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        results = _UNSEEN.run(closed.jaxpr, closed.consts, primals)
        changes = iter(evaluate(linear, *primals, *(tangents[i] for i in floats)))
        return results, [
            next(changes) if flag else _float0(jnp.shape(r))
            for flag, r in zip(outputs, results, strict=True)
        ]

    return function(*operands)


def _float0(shape: tuple[int, ...]) -> Any:
    return np.zeros(shape, jax.dtypes.float0)


def _scan(at: _Evaluator, eqn: Any, operands: list[Any]) -> list[Any]:
    params, closed = eqn.params, eqn.params["jaxpr"]
    first, carried = scan_counts(params)
    last = first + carried
    consts, init, xs = operands[:first], operands[first:last], operands[last:]

    if at.watch is not None and params["length"]:
        start = -1 if params["reverse"] else 0
        at.run(closed.jaxpr, closed.consts, [*consts, *init, *(x[start] for x in xs)])

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        results = _UNSEEN.run(closed.jaxpr, closed.consts, [*consts, *carry, *x])
        return results[: last - first], results[last - first :]

    carry, ys = lax.scan(
        body, list(init), list(xs), length=params["length"], reverse=params["reverse"]
    )
    return [*carry, *ys]


def _while(at: _Evaluator, eqn: Any, operands: list[Any]) -> list[Any]:
    params = eqn.params
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    first, second = params["cond_nconsts"], params["body_nconsts"]
    of_test, of_body, init = (
        operands[:first],
        operands[first : first + second],
        operands[first + second :],
    )
    if at.watch is not None:
        at.run(body.jaxpr, body.consts, [*of_body, *init])

    def goes_on(carry: list[Any]) -> Any:
        return _UNSEEN.run(test.jaxpr, test.consts, [*of_test, *carry])[0]

    def turn(carry: list[Any]) -> list[Any]:
        return _UNSEEN.run(body.jaxpr, body.consts, [*of_body, *carry])

    carry = list(init)
    try:
        # Where arrays are there, turn by turn, as what is differentiated backwards must be.
        while bool(goes_on(carry)):
            carry = turn(carry)
    except jax.errors.ConcretizationTypeError:
        return lax.while_loop(goes_on, turn, list(init))
    return carry


def _cond(at: _Evaluator, eqn: Any, operands: list[Any]) -> list[Any]:
    if at.watch is not None:
        for number, branch in enumerate(eqn.params["branches"]):
            at.inside(number).run(branch.jaxpr, branch.consts, operands[1:])
    branches: list[Callable[..., Any]] = [
        lambda *xs, branch=branch: _UNSEEN.run(branch.jaxpr, branch.consts, xs)
        for branch in eqn.params["branches"]
    ]
    return lax.switch(operands[0].astype(jnp.int32), branches, *operands[1:])


_SCATTER = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}


def _scatter(at: _Evaluator, eqn: Any, operands: list[Any]) -> list[Any]:
    """Made anew, because the equation holds the addition of its own type."""
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return [_SCATTER[eqn.primitive.name](*operands, **{n: eqn.params[n] for n in names})]


def _shard_map(at: _Evaluator, eqn: Any, operands: list[Any]) -> list[Any]:
    raise ValueError(
        "unitscale.analysis: expected a program on one device; got one with shard_map, whose "
        "collectives have no meaning there. Analyse the function inside of it."
    )


def _reduce(at: _Evaluator, eqn: Any, operands: list[Any]) -> list[Any]:
    """One element after another, by what it applies to two of them: so it has a derivative."""
    closed, half = eqn.params["jaxpr"], len(operands) // 2
    join = jnp.vectorize(lambda *both: tuple(at.run(closed.jaxpr, closed.consts, both)))
    summed = eqn.params["dimensions"]

    def first(x: Any) -> Any:
        x = jnp.moveaxis(x, summed, range(len(summed)))
        return x.reshape(-1, *x.shape[len(summed) :])

    rows = list(map(first, operands[:half]))
    start = [jnp.broadcast_to(s, x.shape[1:]) for s, x in zip(operands[half:], rows, strict=True)]
    return lax.scan(lambda carry, row: (list(join(*carry, *row)), None), start, rows)[0]


_RULES: dict[str, Callable[[_Evaluator, Any, list[Any]], list[Any]]] = {
    "convert_element_type": _convert,
    "reduce_precision": _identity,
    "bitcast_convert_type": _bits,
    "custom_vjp_call": _custom_vjp,
    "custom_jvp_call": _custom_jvp,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "reduce": _reduce,
    **dict.fromkeys(_SCATTER, _scatter),
}
