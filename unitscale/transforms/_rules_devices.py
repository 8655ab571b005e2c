"""Programs of many devices: shard_map, and collectives, whose operands agree on a scale first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from ._doubt import DOUBT, UNKNOWN
from ._interpreter import Interpreter
from ._lazy_scale import LazyScale
from ._packing import pack, unpack
from ._registry import register
from ._settle import finish, ready, rounded, settle
from ._values import Value, narrow, spans, times, uniform, widen


def _varying(array: Any) -> frozenset[Any]:
    """The mesh axes over which JAX knows an array to differ."""
    aval = jax.typeof(array)
    if hasattr(aval, "manual_axis_type"):
        return aval.manual_axis_type.varying
    return getattr(aval, "vma", frozenset())


def _names(axes: Any) -> tuple[str, ...]:
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    return tuple(a for a in axes if not isinstance(a, int))


def agreed(value: Value, axes: Sequence[str]) -> Value:
    """Brings a value to one scale across devices: the largest.

    Nothing is sent where JAX knows that the scale is the same everywhere.
    """
    value = uniform(value)
    if value.scale is None or value.scale.is_static or not axes:
        return value
    arrays = [atom.array for atom in value.scale.powers]
    if _varying(value.data) and not any(_varying(a) & set(axes) for a in arrays):
        return value
    if spans(value.dtype):
        return ready(value.at_one())
    most = lax.pmax(lax.stop_gradient(value.scale.array()), tuple(axes))
    scale = LazyScale.of(most, "the largest of all devices")
    data = times(widen(value.data), value.scale / scale)
    data = narrow(data, jnp.result_type(value.data))
    return Value(data, scale, value.drift, value.dtype, doubt=value.doubt)


def _count(axes: Any, shape: tuple[int, ...]) -> int:
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    sizes = [shape[a] if isinstance(a, int) else lax.axis_size(a) for a in axes]
    return int(np.prod(sizes))


def _summed(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    axes = eqn.params["axes" if "axes" in eqn.params else "axis_name"]
    prepared, drifts = [], []
    for value in values:
        growth = interpreter.growth("psum", _count(axes, value.shape))
        is_narrow = value.scale is not None and np.dtype(value.dtype).itemsize < 4
        # Each device may measure its own part: what they sum has the largest of their scales.
        value = agreed(ready(value) if is_narrow else value, _names(axes))
        if is_narrow:
            if jnp.result_type(value.data).itemsize == 1:  # is computed with in 16
                value = value.with_data(lax.convert_element_type(value.data, value.dtype))
            # Narrow data shrinks before it is summed: it travels narrow, and must not overflow.
            value = ready(value.with_data(value.data, drift=value.drift + growth))
            growth = 0.0
        prepared.append(value)
        drifts.append(value.drift + growth)
    results = interpreter.bind(eqn, [v.data for v in prepared])
    results = results if eqn.primitive.multiple_results else [results]
    return [
        Value(r) if v.scale is None else rounded(finish(r, v.scale, d, v.dtype))
        for r, v, d in zip(results, prepared, drifts, strict=True)
    ]


@register("collective", "psum", "psum_invariant", "reduce_scatter", "unreduced_psum")
def summed(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Any:
    """One scale across devices, then summed; the scale grows by the root of their number."""
    results = _summed(interpreter, eqn, values)
    return results if eqn.primitive.multiple_results else results[0]


_MOVED = (
    "pmax",
    "pmin",
    "all_gather",
    "all_gather_invariant",
    "all_gather_reduced",
    "all_to_all",
    "ppermute",
    "ragged_all_to_all",
    "preduced",
    "pbroadcast",
    "vary_unreduced_cast",
    "vary_unreduced_cast_p",
    "reduced_vary_cast",
    "reduced_vary_cast_p",
    "unreduced_reduce_scatter",
    "pbroadcast_dynamic",
)


@register("collective", *_MOVED)
def moved(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Any:
    """One scale across devices, then data is sent."""
    axes = _names(eqn.params.get("axes", eqn.params.get("axis_name", ())))
    sent = [agreed(ready(v), axes) for v in values]
    results = interpreter.bind(eqn, [v.data for v in sent])
    if eqn.primitive.multiple_results:
        return [v.with_data(r) for v, r in zip(sent, results, strict=True)]
    return sent[0].with_data(results)


@register("collective", "pvary")
def varied(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Data varies over the axes too: over those that its scale has not made it vary over yet."""
    (x,) = values
    new = tuple(axis for axis in eqn.params["axes"] if axis not in _varying(x.data))
    return x.with_data(interpreter.bind(eqn, [x.data], axes=new)) if new else x


@register("call", "shard_map")
def shard_map(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """The same mesh and specs for data; scales are the same on every device."""
    params = eqn.params
    axes = tuple(params["newly_manual_axes"])
    packed = pack([uniform(v) for v in values])
    specs: list[Any] = []

    def function(*arrays: Any) -> tuple[list[Any], list[Any]]:
        inner, _ = unpack(packed.specs, arrays)
        results = Interpreter(interpreter.settings).run(params["jaxpr"], (), inner)
        results = [agreed(ready(settle(v)), axes) for v in results]
        specs[:] = [(v.scale is not None, v.dtype) for v in results]
        scales = [v.scale.array() for v in results if v.scale is not None]
        return [v.data for v in results], [jnp.asarray(lax.stop_gradient(s)) for s in scales]

    replicated = PartitionSpec()
    mapped = jax.shard_map(
        function,
        mesh=params["mesh"],
        in_specs=(*params["in_specs"], *[replicated] * len(packed.atoms)),
        out_specs=(list(params["out_specs"]), replicated),
        check_vma=params["check_vma"],
        axis_names=set(axes),
    )
    data, arrays = mapped(*packed.arrays)
    scales = iter(arrays)

    def whole(data: Any, dtype: Any) -> Value:
        doubt = UNKNOWN if spans(dtype) else DOUBT
        return Value(
            data, LazyScale.of(next(scales), "one for all devices"), 0.0, dtype, doubt=doubt
        )

    return [
        whole(d, dtype) if scaled else Value(d)
        for d, (scaled, dtype) in zip(data, specs, strict=True)
    ]
