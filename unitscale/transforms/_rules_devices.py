"""Rules of shard_map and of collectives, whose operands first get one scale on all devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from ..core import varying
from ._interpreter import Interpreter, register
from ._rules_arrays import choice
from ._rules_calls import pack, unpack
from ._values import Scale, Value, fit, spans, times, wide_value, widen


def _names(axes: Any) -> tuple[str, ...]:
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    return tuple(a for a in axes if not isinstance(a, int))


def agreed(value: Value, axes: Sequence[str]) -> Value:
    """Store a value at the largest scale of any device, unless all devices have the same."""
    value = value.stored()
    if value.scale is None or value.scale.array is None or not axes:
        return value
    if varying(value.data) and not varying(value.scale.array) & set(axes):
        return value
    if spans(value.dtype):
        return wide_value(value.wide(), value.dtype).stored()
    # The scale of zeros is 1, which would make small numbers on other devices 0.
    own = jnp.where(jnp.any(value.data != 0), value.scale.factor(), 0)
    most = lax.pmax(lax.stop_gradient(own), tuple(axes))
    scale = Scale(0, jnp.where(most > 0, most, 1))
    data = times(widen(value.data), value.scale * scale.inverse())
    return Value(fit(data, jnp.result_type(value.data)), scale, value.dtype, value.steps)


def _count(axes: Any, shape: tuple[int, ...]) -> int:
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    return int(np.prod([shape[a] if isinstance(a, int) else lax.axis_size(a) for a in axes]))


@register("collective", "psum", "psum_invariant", "reduce_scatter", "unreduced_psum")
def summed(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Any:
    """Store at one scale for all devices, then sum; 16-bit data is sent in 16 bits."""
    axes = eqn.params["axes" if "axes" in eqn.params else "axis_name"]
    sent = []
    for value in values:
        value = agreed(value, _names(axes))
        held = np.dtype(jnp.result_type(value.data))
        held = held if held.itemsize > 1 else np.dtype(value.dtype)  # FP8 data of a wider value
        if value.scale is not None:
            # Divide narrow data before it is summed, so that the sum does not overflow.
            growth = 0
            if held.itemsize < 4 and not (value.scale.is_one and spans(held)):
                growth = interpreter.settings.growth("psum", _count(axes, value.shape))
            data = fit(times(widen(value.data), Scale(-growth)), held)
            value = Value(data, value.scale.shift(growth), value.dtype)
        sent.append(value)
    results = interpreter.bind(eqn, [v.data for v in sent])
    if not eqn.primitive.multiple_results:
        return sent[0].with_part(results)
    return [v.with_part(r) for v, r in zip(sent, results, strict=True)]


_MOVED = """
    all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast pbroadcast_dynamic pmax
    pmin ppermute preduced reduced_vary_cast reduced_vary_cast_p unreduced_reduce_scatter
    vary_unreduced_cast vary_unreduced_cast_p
"""


@register("collective", *_MOVED.split())
def moved(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Any:
    """Store at one scale for all devices, then send the data."""
    axes = _names(eqn.params.get("axes", eqn.params.get("axis_name", ())))
    sent = [agreed(v, axes) for v in values]
    results = interpreter.bind(eqn, [v.data for v in sent])
    if eqn.primitive.multiple_results:
        return [v.with_part(r) for v, r in zip(sent, results, strict=True)]
    return sent[0].with_part(results)


@register("collective", "ragged_all_to_all")
def sent_into(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Store at one scale for all devices; the second operand receives data of the first."""
    return choice(interpreter, eqn, [agreed(v, _names(eqn.params["axis_name"])) for v in values])


@register("collective", "pvary")
def varied(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Mark data as varying over the mesh axes that it does not vary over yet."""
    (x,) = values
    new = tuple(axis for axis in eqn.params["axes"] if axis not in varying(x.data))
    return x.with_data(interpreter.bind(eqn, [x.data], axes=new)) if new else x


@register("call", "shard_map")
def shard_map(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Map the scaled program with the same mesh and specs; scales are equal on all devices."""
    params = eqn.params
    axes = tuple(params["newly_manual_axes"])
    packed = pack([v.uniform() for v in values])
    types: list[Any] = []

    def function(*arrays: Any) -> tuple[list[Any], list[Any]]:
        inner = unpack(packed.specs, arrays)
        results = Interpreter(interpreter.settings).run(params["jaxpr"], (), inner)
        results = [agreed(v.uniform().leaving(), axes) for v in results]
        types[:] = [v.dtype for v in results]
        scales = [v.scale.factor() for v in results if v.scale is not None]
        return [v.data for v in results], [jnp.asarray(lax.stop_gradient(s)) for s in scales]

    mapped = jax.shard_map(
        function,
        mesh=params["mesh"],
        in_specs=(*params["in_specs"], *[PartitionSpec()] * len(packed.scales)),
        out_specs=(list(params["out_specs"]), PartitionSpec()),
        check_vma=params["check_vma"],
        axis_names=set(axes),
    )
    data, arrays = mapped(*packed.arrays)
    scales = iter(arrays)
    pairs = zip(data, types, strict=True)
    return [Value(d) if t is None else Value(d, Scale(0, next(scales)), t, 0) for d, t in pairs]
