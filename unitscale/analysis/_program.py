"""Sources of jaxpr equations; a base class of jaxpr interpreters, and one that uses float64."""

import functools
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ..core import cast, dithered, is_floating, is_scaled, last_uses, scale_fwd, scan_counts

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OPS = (os.path.join(_LIBRARY, "ops", ""), str(sys.modules[scale_fwd.__module__].__file__))
_NN = os.path.join(_LIBRARY, "nn", "")


class Source(NamedTuple):
    """The source of an operation of a program.

    Attributes:
        op: name of the unitscale op that it is a part of, else of its primitive.
        line: ``file:line (function)`` in the user's code, else in the library; "" if unknown.
        layer: classes of the unitscale layers that call the op, such as ``"MLP/Dense"``, or "".
    """

    op: str
    line: str
    layer: str = ""

    def __str__(self) -> str:
        layer = f" of {self.layer}" if self.layer else ""
        return f"{self.op}{layer} at {self.line}" if self.line else f"{self.op}{layer}"


def source_of(*eqns: Any) -> Source:
    """Return the source of the first equation; the others are the calls around it, inmost first."""
    first = _source_of_one(eqns[0])
    known = (source for source in map(_source_of_one, eqns) if source.line)
    return next(known, first)._replace(op=first.op)


def _source_of_one(eqn: Any) -> Source:
    others = [sys.modules[name] for name in ("jax", "flax", "optax") if name in sys.modules]
    foreign = (_LIBRARY, *(path for package in others for path in package.__path__))
    op, library, layers = eqn.primitive.name, "", []
    if op.startswith("custom_") and (inner := inner_program(eqn)):
        op = inner.jaxpr.debug_info.func_name
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        where = f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
        function = frame.function_name.split(".")[0]
        if not frame.file_name.startswith(foreign):
            return Source(op, where, "/".join(reversed(layers)))
        # The outermost function in `ops` is the op that the user called, not a helper.
        if frame.file_name.startswith(_OPS) and not layers and not function.startswith("_"):
            op = function
        is_class = frame.file_name.startswith(_NN) and function[:1].isupper()
        if is_class and layers[-1:] != [function]:
            layers.append(function)
        if frame.file_name.startswith(_LIBRARY):
            library = where
    return Source(op, library, "/".join(reversed(layers)))


def leaves_of(tree: Any) -> list[tuple[Any, str]]:
    """Return the path of each leaf, and "data" or "scale" if it is a part of a ScaledArray."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled)
    return [
        (path, part[0].name if part else "")
        for path, node in nodes
        for part, _ in jax.tree_util.tree_leaves_with_path(node)
    ]


def types_of(variables: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Return the types of variables of a jaxpr, as `jax.make_jaxpr` takes them."""
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]


def bind(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Apply the primitive of an equation."""
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return list(results) if eqn.primitive.multiple_results else [results]


def inner_program(eqn: Any) -> ClosedJaxpr | None:
    """Return the inner program that an equation applies to all of its operands, if any."""
    if eqn.primitive.name in ("reduce", "reduce_window", "scan", "while", "pallas_call"):
        return None
    counts = len(eqn.invars), len(eqn.outvars)
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(name)
        inner = ClosedJaxpr(inner, ()) if isinstance(inner, Jaxpr) else inner
        if isinstance(inner, ClosedJaxpr) and (len(inner.in_avals), len(inner.out_avals)) == counts:
            return inner
    return None


class Interpreter:
    """Run a jaxpr equation by equation; subclasses define how equations act on their values."""

    def __init__(self) -> None:
        # The equation being applied and the calls that it is inside of, outermost first.
        self.calls: list[Any] = []

    def constant(self, x: Any, aval: Any) -> Any:
        """Return the value of a literal or of a constant of the program."""
        return x

    def apply(self, eqn: Any, operands: list[Any]) -> list[Any]:
        raise NotImplementedError

    def run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Return the results of a program; delete each value after its last use."""
        jaxpr = closed.jaxpr
        env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        for var, x in zip(jaxpr.constvars, closed.consts, strict=True):
            env[var] = self.constant(x, var.aval)
        unused = last_uses(jaxpr)

        def read(atom: Any) -> Any:
            is_literal = isinstance(atom, Literal)
            return self.constant(atom.val, atom.aval) if is_literal else env[atom]

        for index, eqn in enumerate(jaxpr.eqns):
            self.calls.append(eqn)
            with eqn.ctx.manager:
                results = self.apply(eqn, [read(atom) for atom in eqn.invars])
            self.calls.pop()
            env.update(zip(eqn.outvars, results, strict=True))
            for var in unused.get(index, ()):
                del env[var]
        return [read(atom) for atom in jaxpr.outvars]

    def body(self, closed: ClosedJaxpr, args: Sequence[Any]) -> tuple[list[Any], Any]:
        """Run a body of control flow; return its results and statistics (None here)."""
        return self.run(closed, args), None

    def combined(self, rows: Any) -> Any:
        """Combine the statistics of iterations along the first axis."""
        return rows

    def control(self, eqn: Any, operands: list[Any]) -> tuple[list[Any], Any]:
        """Run a scan, while loop or conditional; return its results and statistics."""
        rules = {"scan": self._scan, "while": self._while, "cond": self._cond}
        return rules[eqn.primitive.name](eqn.params, operands)

    def _scan(self, params: dict[str, Any], operands: list[Any]) -> tuple[list[Any], Any]:
        first, carried = scan_counts(params)

        def step(carry: list[Any], x: list[Any]) -> tuple[Any, Any]:
            results, rows = self.body(params["jaxpr"], [*operands[:first], *carry, *x])
            return results[:carried], (results[carried:], rows)

        init, xs = operands[first : first + carried], operands[first + carried :]
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, (ys, rows) = lax.scan(step, init, xs, **options)
        return [*carry, *ys], self.combined(rows)

    def _while(self, params: dict[str, Any], operands: list[Any]) -> tuple[list[Any], Any]:
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]

        def step(carry: list[Any]) -> tuple[list[Any], Any]:
            return self.body(params["body_jaxpr"], [*operands[first:second], *carry])

        def proceeds(state: Any) -> Any:
            return self.body(params["cond_jaxpr"], [*operands[:first], *state[0]])[0][0]

        def turn(state: Any) -> Any:
            results, rows = step(state[0])
            return results, self.combined(jax.tree.map(lambda *r: jnp.stack(r), state[1], rows))

        types = jax.eval_shape(step, operands[second:])[1]
        state = operands[second:], jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), types)
        try:  # reverse mode needs a Python loop, which needs known values
            while bool(proceeds(state)):
                state = turn(state)
            return state
        except jax.errors.ConcretizationTypeError:
            return lax.while_loop(proceeds, turn, state)

    def _cond(self, params: dict[str, Any], operands: list[Any]) -> tuple[list[Any], Any]:
        branches, args = params["branches"], operands[1:]
        types = [jax.eval_shape(lambda *xs, b=b: self.body(b, xs)[1], *args) for b in branches]

        def branch(number: int, *xs: Any) -> tuple[list[Any], Any]:
            results, own = self.body(branches[number], xs)
            rows = [jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), t) for t in types]
            rows[number] = own
            return results, jax.tree.map(lambda *parts: jnp.concatenate(parts), *rows)

        choices = [functools.partial(branch, number) for number in range(len(branches))]
        return lax.switch(operands[0], choices, *args)


def wide(x: Any) -> Any:
    """Return a floating array in float64, and any other value unchanged."""
    return lax.convert_element_type(x, jnp.float64) if is_floating(x) else x


def evaluate(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluate a program in float64; call it under `jax.enable_x64(True)`."""
    arrays = [jnp.asarray(x) if isinstance(x, float | int) else x for x in args]
    return Exact().run(closed, [wide(x) for x in arrays])


@functools.cache
def _names_of_rounding() -> set[str]:
    """Return the names in jaxprs of the functions that only round."""
    eqns = jax.make_jaxpr(lambda x: dithered(cast(x, "E4M3"), 2))(1.0).eqns
    return {p.jaxpr.debug_info.func_name for eqn in eqns if (p := inner_program(eqn)) is not None}


def only_rounds(eqn: Any) -> bool:
    """Return whether an equation is `cast` or `dithered`, and not the derivative of one."""
    inner = inner_program(eqn)
    if inner is None or inner.jaxpr.debug_info.func_name not in _names_of_rounding():
        return False
    x, *results = ((v.aval.shape, is_floating(v.aval)) for v in (eqn.invars[0], *eqn.outvars))
    return x[1] and results == [x]


class Exact(Interpreter):
    """Evaluate programs in float64, without casts and rounding.

    The derivative of the result is the true one, because functions with a custom_vjp are replaced
    by their forward bodies. Rules of custom_jvp are kept.
    """

    def constant(self, x: Any, aval: Any) -> Any:
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        return np.asarray(x, np.float64 if is_floating(aval) else aval.dtype)

    def apply(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name, inner = eqn.primitive.name, inner_program(eqn)
        floats = all(is_floating(atom.aval) for atom in (*eqn.invars, *eqn.outvars))
        if name == "reduce_precision" or (name == "convert_element_type" and floats):
            return operands
        if only_rounds(eqn):
            return operands[:1]
        if name in ("scan", "while", "cond"):
            return self.control(eqn, operands)[0]
        if name == "custom_jvp_call":
            return _custom_jvp(eqn, operands)
        if name == "reduce":
            return self._reduce(eqn, operands)
        if name == "shard_map":
            raise ValueError(
                "unitscale.analysis: expected a program on one device; got one with shard_map. "
                "Analyze the function inside of it."
            )
        if inner is not None:
            return self.run(inner, operands)
        if name.startswith("scatter"):  # the equation's own update function is not in float64
            names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            scatter = getattr(lax, name.replace("-", "_"))
            return [scatter(*operands, **{n: eqn.params[n] for n in names})]
        return [wide(r) for r in _bind_wide(eqn, operands)]

    def _reduce(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Reduce by a scan over the elements, which has a derivative."""
        half, dims = len(operands) // 2, eqn.params["dimensions"]
        join = jnp.vectorize(lambda *both: tuple(self.run(eqn.params["jaxpr"], both)))
        moved = [jnp.moveaxis(x, dims, range(len(dims))) for x in operands[:half]]
        xs = [x.reshape(-1, *x.shape[len(dims) :]) for x in moved]
        start = [jnp.broadcast_to(s, x.shape[1:]) for s, x in zip(operands[half:], xs, strict=True)]
        return lax.scan(lambda carry, x: (list(join(*carry, *x)), None), start, xs)[0]


def _bind_wide(eqn: Any, operands: list[Any]) -> list[Any]:
    """Apply a primitive in float64, or in its own types if it reads their bits."""

    def widened(value: Any) -> Any:
        try:
            is_type = isinstance(value, np.dtype | type) and jnp.issubdtype(value, jnp.floating)
        except TypeError:
            return value
        return np.dtype(np.float64) if is_type else value

    if eqn.primitive.name != "bitcast_convert_type":
        params = {name: widened(value) for name, value in eqn.params.items()}
        if "precision" in params:
            params["precision"] = None  # some precisions round the operands
        try:
            return bind(eqn, operands, params)
        except (TypeError, ValueError, NotImplementedError):
            pass  # the operation has no float64 form
    stored = [
        lax.convert_element_type(x, atom.aval.dtype) if is_floating(atom.aval) else x
        for x, atom in zip(operands, eqn.invars, strict=True)
    ]
    return bind(eqn, stored, eqn.params)


def _custom_jvp(eqn: Any, operands: list[Any]) -> list[Any]:
    """Evaluate a function, and keep its custom_jvp rule, such as relu's at zero."""
    closed, avals = eqn.params["call_jaxpr"], types_of(eqn.invars)
    _, rule = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
    float0 = jax.dtypes.float0  # the type of tangents of integers
    tangents = [a if is_floating(a) else jax.ShapeDtypeStruct(a.shape, float0) for a in avals]
    try:
        with_tangents = jax.make_jaxpr(rule.call_wrapped)(*avals, *tangents)
    except TypeError:  # FP8 matmuls reject second derivatives; differentiate their bodies instead
        return Exact().run(closed, operands)
    function = jax.custom_jvp(lambda *xs: Exact().run(closed, xs))

    @function.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        found = evaluate(with_tangents, *primals, *tangents)
        return found[: len(eqn.outvars)], found[len(eqn.outvars) :]

    return function(*operands)
