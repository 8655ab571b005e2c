"""Executes the equations of a program one by one, and measures what each computes.

An equation is compiled by itself, once for all layers of the same shape, and a value is gone as
soon as nothing reads it any more. Loops and branches are compiled whole, and return statistics of
the values inside beside their results.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import Jaxpr, Literal, jaxpr_as_fun

from ..core import Format, last_uses, scan_counts
from ._graph import inner_jaxpr, is_float
from ._scale_sums import ScaleSums, add_rows, over_iterations
from ._source import Source, source_of

# Primitives whose results hold the same numbers as an operand.
_VIEWS = {
    "broadcast_in_dim",
    "copy",
    "copy_p",
    "expand_dims",
    "optimization_barrier",
    "reshape",
    "rev",
    "slice",
    "squeeze",
    "stop_gradient",
    "transpose",
}


class Site(NamedTuple):
    """A value that is measured: where it comes from, and its name if it is an input or a result."""

    source: Source
    primitive: str
    scope: str
    aval: Any
    name: str = ""


class Memory(NamedTuple):
    """What executions of one program share.

    Attributes:
        found: by the equations that call one another, what is known of the last.
        programs: loops and branches, compiled, by their text.
    """

    found: dict[tuple[int, ...], Any]
    programs: dict[Any, Any]


class Watcher:
    """Executes a program, and collects statistics of its values.

    Args:
        formats: formats that elements are counted for.
        sample: elements that large arrays are measured on, or None.
        memory: of executions of the same jaxpr before.

    Attributes:
        sites: of the values that were measured, in the order of their rows.
    """

    def __init__(self, formats: tuple[Format, ...], sample: int | None, memory: Memory):
        self.formats = formats
        self.sample = sample
        self.memory = memory
        self.sites: list[Site] = []
        self.calls: list[Any] = []
        # The site of a value, by id; a value that is gone leaves its id to others.
        self.noted: dict[int, int] = {}
        # What depends on no input is the program's own, and not measured.
        self.constants: dict[int, Any] = {}

    def sums(self) -> ScaleSums:
        """What collects the values of a body: one for each, as none may leave the body's trace."""
        return ScaleSums(self.formats, self.sample)

    def rows(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> tuple[list, Any]:
        """The results of a body that is traced, and the statistics of its values."""
        sums = self.sums()
        return self.run(jaxpr, consts, args, sums), sums.together()

    def name_results(self, values: Sequence[Any], out: Any) -> None:
        """Names the sites of values that the function returns."""
        for value, (path, _) in zip(values, jax.tree_util.tree_leaves_with_path(out), strict=True):
            if (index := self.noted.get(id(value))) is not None:
                name = f"result{jax.tree_util.keystr(path)}"
                self.sites[index] = self.sites[index]._replace(name=name)

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], sums: ScaleSums
    ) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        unused = last_uses(jaxpr)

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for index, eqn in enumerate(jaxpr.eqns):
            self.calls.append(eqn)
            with eqn.ctx.manager:
                results = self.apply(eqn, [read(atom) for atom in eqn.invars], sums)
            env.update(zip(eqn.outvars, results, strict=True))
            self.calls.pop()
            for var in unused.get(index, ()):
                del env[var]
        return [read(atom) for atom in jaxpr.outvars]

    def apply(self, eqn: Any, operands: list[Any], sums: ScaleSums) -> list[Any]:
        name = eqn.primitive.name
        inner = inner_jaxpr(eqn)
        if inner is not None and name not in ("pallas_call", "shard_map", "scan", "while"):
            closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if eqn.params.get("differentiated"):
                # Computed again in the backward pass, as it was meant to be.
                operands = list(lax.optimization_barrier(tuple(operands)))
            return self.run(inner, getattr(closed, "consts", ()), operands, sums)
        if name == "cond" and (platforms := eqn.params.get("branches_platforms")):
            # The others would not be compiled either.
            own = jax.default_backend()
            index = next(i for i, names in enumerate(platforms) if names is None or own in names)
            branch = eqn.params["branches"][index]
            return self.run(branch.jaxpr, branch.consts, operands[1:], sums)
        special = {"scan": self.scan, "while": self.loop, "cond": self.cond}
        if name in special:
            results, rows = self.whole(functools.partial(special[name], eqn), operands)
            sums.extend(rows)
        else:
            results = _executed(eqn, operands)
        for value in results:
            self.noted.pop(id(value), None)
        if name in special:
            return results
        if all(
            isinstance(atom, Literal) or id(x) in self.constants
            for atom, x in zip(eqn.invars, operands, strict=True)
        ):
            self.constants.update((id(x), x) for x in results)
        elif name not in _VIEWS:
            self.note(eqn, results, sums)
        return results

    def note(self, eqn: Any, results: list[Any], sums: ScaleSums) -> None:
        """Adds sites for the floating results of an equation, and their statistics."""
        pairs = zip(eqn.outvars, results, strict=True)
        found = [
            (var, value)
            for var, value in pairs
            if is_float(var.aval) and jnp.size(value) and type(var).__name__ != "DropVar"
        ]
        made = self.once(lambda: [self._site(eqn, var) for var, _ in found])
        for (_, value), site in zip(found, made, strict=True):
            self.noted[id(value)] = len(self.sites)
            self.sites.append(site)
            sums.add(value)

    def _site(self, eqn: Any, var: Any) -> Site:
        scope = "/".join(part for e in self.calls if (part := str(e.source_info.name_stack)))
        return Site(source_of(*reversed(self.calls)), eqn.primitive.name, scope, var.aval)

    def once(self, make: Callable[[], Any]) -> Any:
        """What the equation at hand, called as it is now, is found to be the first time."""
        where = tuple(map(id, self.calls))
        if where not in self.memory.found:
            self.memory.found[where] = make()
        return self.memory.found[where]

    def whole(self, control: Callable[..., Any], operands: list[Any]) -> Any:
        """Executes control flow, compiled once for all layers that have the same."""
        if any(isinstance(x, Tracer) for x in operands):
            return control(operands)

        def compiled() -> tuple[Any, list[Site]]:
            before = len(self.sites)
            lowered = jax.jit(lambda *xs: control([*xs])).lower(*operands)
            sites = self.sites[before:]
            del self.sites[before:]
            key = lowered.as_text(), *(getattr(x, "sharding", None) for x in operands)
            if key not in self.memory.programs:
                self.memory.programs[key] = lowered.compile()
            return self.memory.programs[key], sites

        program, sites = self.once(compiled)
        self.sites += sites
        return program(*operands)

    def scan(self, eqn: Any, operands: list[Any]) -> tuple[list[Any], Any]:
        params, closed = eqn.params, eqn.params["jaxpr"]
        first, carried = scan_counts(params)
        last = first + carried

        def body(carry: Any, x: Any) -> tuple[Any, Any]:
            (*state,) = carry
            results, rows = self.rows(closed.jaxpr, closed.consts, [*operands[:first], *state, *x])
            return results[: last - first], (results[last - first :], rows)

        before = len(self.sites)
        carry, (ys, rows) = lax.scan(
            body,
            operands[first:last],
            operands[last:],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        self.shorten(before, rows.shape[1])
        return [*carry, *ys], over_iterations(rows)

    def shorten(self, before: int, count: int) -> None:
        """Keeps the sites of one trace of a body that JAX may have traced several times."""
        del self.sites[before + count :]

    def loop(self, eqn: Any, operands: list[Any]) -> tuple[list[Any], Any]:
        params = eqn.params
        test, body = params["cond_jaxpr"], params["body_jaxpr"]
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        before = len(self.sites)

        def step(state: Any) -> Any:
            return self.rows(body.jaxpr, body.consts, [*operands[first:second], *state])

        shape = jax.eval_shape(step, operands[second:])[1]

        def advance(state: Any) -> Any:
            results, rows = step(state[0])
            return results, add_rows(state[1], rows)

        def proceed(state: Any) -> Any:
            plain = jaxpr_as_fun(test)
            return plain(*operands[:first], *state[0])[0]

        none = jnp.zeros(shape.shape, shape.dtype)
        results, rows = lax.while_loop(proceed, advance, (operands[second:], none))
        self.shorten(before, len(none))
        return results, rows

    def cond(self, eqn: Any, operands: list[Any]) -> tuple[list[Any], Any]:
        branches = eqn.params["branches"]
        before = len(self.sites)
        shapes = [
            jax.eval_shape(lambda *xs, b=b: self.rows(b.jaxpr, b.consts, xs), *operands[1:])[1]
            for b in branches
        ]

        def taken(number: int) -> Callable[..., Any]:
            def branch(*xs: Any) -> Any:
                results, own = self.rows(branches[number].jaxpr, branches[number].consts, xs)
                every = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
                every[number] = own
                return results, jnp.concatenate(every)

            return branch

        results, rows = lax.switch(operands[0], [*map(taken, range(len(branches)))], *operands[1:])
        self.shorten(before, len(rows))
        return results, rows


def _executed(eqn: Any, operands: list[Any]) -> list[Any]:
    """The results of one equation, compiled by itself."""

    def bind(*operands: Any) -> list[Any]:
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        return list(results) if eqn.primitive.multiple_results else [results]

    # Without a compiler around it a kernel, or what devices do together, is interpreted.
    whole = eqn.primitive.name in ("pallas_call", "shard_map")
    return (jax.jit(bind) if whole else bind)(*operands)
