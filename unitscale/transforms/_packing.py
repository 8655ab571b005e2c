"""Passes values across a boundary that takes arrays: an inner jaxpr, a loop, a mesh.

What is known while tracing travels beside the arrays, as a hashable `Spec` per value, and the
formula of a scale survives: atoms go through once, however many scales are made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr

from ._doubt import Doubt
from ._interpreter import Interpreter, Settings
from ._lazy_scale import Atom, LazyScale
from ._values import Value


class Spec(NamedTuple):
    """What is known of a value: the scale's log2 and powers by atom position, and the rest.

    The position of ``nonzero`` is that among the operands.
    """

    log2: float | None
    powers: tuple[tuple[int, int], ...]
    drift: float
    dtype: Any
    const: str | None
    doubt: Doubt
    nonzero: int | None = None

    def unpack(self, data: Any, atoms: Sequence[Atom], operands: Sequence[Value] = ()) -> Value:
        """Rebuilds the value."""
        const = None if self.const is None else float(self.const)
        if self.log2 is None:
            if self.nonzero is None or not operands:
                return Value(data, const=const)
            source = operands[self.nonzero]
            return Value(data, const=const, nonzero=source.nonzero or source)
        scale = LazyScale(self.log2, {atoms[i]: power for i, power in self.powers})
        return Value(data, scale, self.drift, self.dtype, const, self.doubt)


def spec_of(value: Value, atoms: list[Atom], operands: Sequence[Value] = ()) -> Spec:
    """Describes a value; atoms that are not in the list yet are appended to it."""
    # A string, because NaN is not equal to itself and -0.0 is equal to 0.0.
    const = None if value.const is None else repr(float(value.const))
    if value.scale is None:
        nonzero = next((i for i, x in enumerate(operands) if x is value.nonzero), None)
        return Spec(None, (), 0.0, None, const, Doubt(0.0), nonzero)
    powers = []
    for atom, power in value.scale.powers.items():
        if atom not in atoms:
            atoms.append(atom)
        powers.append((atoms.index(atom), power))
    return Spec(
        value.scale.log2,
        tuple(sorted(powers)),
        value.drift,
        value.dtype,
        const,
        value.doubt,
    )


class Packed(NamedTuple):
    """Values, and the same as arrays (data first, then atoms) and specs."""

    values: Sequence[Value]
    data: list[Any]
    atoms: list[Atom]
    specs: tuple[Spec, ...]

    @property
    def arrays(self) -> list[Any]:
        """All arrays: data, then atoms."""
        return [*self.data, *(atom.array for atom in self.atoms)]


def pack(values: Sequence[Value]) -> Packed:
    """Splits values into arrays and specs."""
    atoms: list[Atom] = []
    specs = tuple(spec_of(v, atoms) for v in values)
    return Packed(values, [v.data for v in values], atoms, specs)


def unpack(specs: Sequence[Spec], arrays: Sequence[Any]) -> tuple[list[Value], list[Atom]]:
    """Rebuilds values from the arrays of `Packed.arrays`; returns the atoms too."""
    atoms = [Atom(array) for array in arrays[len(specs) :]]
    return [s.unpack(a, atoms) for s, a in zip(specs, arrays, strict=False)], atoms


class Traced(NamedTuple):
    """An inner jaxpr on arrays, and how its results become values again.

    The results of ``closed`` are the data of every value, then the atoms made inside. Specs count
    the atoms of the operands first, then those.
    """

    closed: ClosedJaxpr
    specs: tuple[Spec, ...]

    def rebuild(
        self, results: Sequence[Any], atoms: Sequence[Atom], operands: Sequence[Value] = ()
    ) -> list[Value]:
        """Turns results into values; ``atoms`` are those of the operands."""
        count = len(self.specs)
        known = [*atoms, *(Atom(array) for array in results[count:])]
        specs = zip(self.specs, results[:count], strict=True)
        return [s.unpack(r, known, operands) for s, r in specs]


def _key_of(array: Any) -> Any:
    aval = jax.typeof(array)
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False), str(aval)


def trace(settings: Settings, jaxpr: ClosedJaxpr, packed: Packed) -> Traced:
    """Scales an inner jaxpr, once for every knowledge of its operands.

    Args:
        settings: holds what was traced before.
        jaxpr: the inner program; its constants have no scale.
        packed: its operands.

    Returns:
        The jaxpr on arrays, without constants of its own.
    """
    arrays = packed.arrays
    key = (id(jaxpr), packed.specs, tuple(map(_key_of, arrays)))
    if key not in settings.traces:
        specs: list[tuple[Spec, ...]] = []

        def scaled(*inner: Any) -> list[Any]:
            values, atoms = unpack(packed.specs, inner)
            results = Interpreter(settings).run(jaxpr.jaxpr, jaxpr.consts, values)
            known = list(atoms)
            specs.append(tuple(spec_of(v, known, values) for v in results))
            return [*(v.data for v in results), *(a.array for a in known[len(atoms) :])]

        closed = jax.make_jaxpr(scaled)(*arrays)
        settings.traces[key] = (Traced(closed, specs[-1]), jaxpr)
    return settings.traces[key][0]
