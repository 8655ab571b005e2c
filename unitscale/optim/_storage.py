"""Storage of weights and moments: formats, choice of scales, and rounding."""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import export, lax

from ..core import (
    ScaledArray,
    amax,
    cast,
    format_of,
    is_scaled,
    rms,
    scale_near,
    storage_of,
    to_float,
    widen,
)

if TYPE_CHECKING:
    from typing_extensions import TypeIs

WITHIN_SCALIFY = (
    "Within scalify every ScaledArray looks like a plain array: scalify only the gradients, and "
    "call tx.step outside."
)

# Size above which arrays are sampled, and sizes of samples: of rows, of columns, and per item.
_UNSAMPLED, _ROW_SAMPLE, _COLUMN_SAMPLE, _ITEM_SAMPLE = 2**16, 2**14, 2**13, 2**10
# Binades of headroom above the largest sampled entry: in formats with 5 exponent bits, in formats
# with fewer, and in the latter after an entry exceeded its headroom.
_ROOM, _ROOM_NARROW, _ROOM_AFTER_GROWTH = 10, 1, 4
# Limits on choosing scales together on a GPU: number of arrays (more take longer to compile), and
# entries of each (grouping larger arrays saves little time, and keeps their gradients in memory).
_GROUP, _GROUPED_ENTRIES = 16, 2**24
# Exponent assumed for the largest entry if all sampled entries are zero.
_EXPONENT_OF_UNSEEN = -14
# Scale of all-zero parameters: float16 holds first updates of 2^-22 to 2^7 at full precision.
_SCALE_OF_ZEROS = 2.0**-8


@dataclasses.dataclass(frozen=True)
class Moment:
    """The storage format of an array of optimizer state.

    Scaling:
        data = x / scale, or sign(x) |x|^1/2 / scale if ``root``. Every step chooses the scale, a
        power of two (1 in float32 and bfloat16). For arrays of up to 2^16 entries, initial states
        and blocks, the scale follows from the exact maximum, so that nothing saturates.

        For larger arrays it follows from a sample of about 2^14 evenly spaced entries, with
        headroom of 2^10 in formats with 5 exponent bits (float16, e5m2). In others the headroom is
        2, above the largest entry of the sample and of the previous state. Larger entries saturate
        for some steps.

        The root halves the exponents: float8_e4m3fn then covers 2^34 between the largest and the
        smallest second moment, with a relative error of at most 2^-3. Nonzero values never round to
        zero: a second moment that became zero before the first would make the step explode.

    Attributes:
        dtype: float8, float16, bfloat16 or float32.
        root: whether the square root is stored.
        block: number of entries along the last axis that share a scale; None for one per array.
        stack_axes: number of leading axes along which each item has a scale; unused with ``block``.

    Raises:
        ValueError: if the dtype is not one of those, or block is not positive.
    """

    dtype: Any
    root: bool = False
    block: int | None = None
    stack_axes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", storage_of("optim.Moment: dtype", self.dtype).dtype)
        if self.block is not None and not (isinstance(self.block, int) and self.block > 0):
            raise ValueError(
                "unitscale.optim.Moment: block must be a positive number of entries or None; got "
                f"{self.block!r}"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SquareRoot:
    """An array, stored as the ScaledArray of its square root (with the sign of the array)."""

    root: ScaledArray

    @property
    def value(self) -> jax.Array:
        """The array in float32."""
        return load(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.root.shape

    @property
    def nbytes(self) -> int:
        """The number of bytes of data and scale."""
        return self.root.nbytes


export.register_pytree_node_serialization(
    SquareRoot,
    serialized_name="unitscale.optim.SquareRoot",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: (),
)


def is_floating(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def is_stored(x: Any) -> "TypeIs[ScaledArray | SquareRoot]":
    """Return whether ``x`` is stored state (ScaledArray, SquareRoot): an `is_leaf` for trees."""
    return is_scaled(x) or isinstance(x, SquareRoot)


def _scaled_array(stored: ScaledArray | SquareRoot) -> ScaledArray:
    inner = stored.root if isinstance(stored, SquareRoot) else stored
    if not is_scaled(inner):
        raise ValueError(
            "unitscale.optim.scaled: state must hold ScaledArrays, as tx.init returns them; got a "
            f"{type(inner).__name__}. {WITHIN_SCALIFY}"
        )
    return inner


def moment_of(stored: ScaledArray | SquareRoot) -> Moment:
    """Return the storage format of an array of state."""
    inner = _scaled_array(stored)
    block = None if inner.block_shape is None else inner.block_shape[-1]
    return Moment(inner.dtype, isinstance(stored, SquareRoot), block, stack_axes_of(inner))


def stack_axes_of(x: Any) -> int:
    """Return the number of leading axes along which each item has its own scale."""
    if not is_scaled(x) or x.scale is None or x.block_shape is not None:
        return 0
    shape = x.scale.shape
    count = max((axis + 1 for axis, n in enumerate(shape) if n > 1), default=0)
    return count if shape[:count] == x.shape[:count] else 0


def split_key(key: jax.Array | None, names: Collection[Any]) -> dict[Any, Any]:
    """Return random words for `cast`, by name; nothing without a key."""
    if key is None or not names:
        return {}
    # Draw all at once: XLA compiles a loop of 200 operations for each place that draws bits.
    draw = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))
    return dict(zip(names, map(tuple, draw(jax.random.split(key, len(names)))), strict=True))


def load(stored: Any) -> Any:
    """Return a stored array as a float32 array, and anything else unchanged."""
    if not is_stored(stored):
        return stored
    x = widen(_scaled_array(stored).value)
    return x * lax.abs(x) if isinstance(stored, SquareRoot) else x


# The biased exponents of the largest entries so far, and the binades of headroom above them; empty
# in formats with 5 exponent bits, whose headroom is the constant _ROOM.
Seen: TypeAlias = tuple[jax.Array, jax.Array] | tuple[()]
Path: TypeAlias = tuple[Any, ...]
# The size of an array, and the static and the array arguments of the function that chooses its
# scale.
Choice: TypeAlias = tuple[int, tuple[Any, ...], tuple[Any, ...]]


def inspect(state: dict[Path, Any]) -> dict[Path, tuple[Any, Seen | None]]:
    """Return the arrays to load, each with its `Seen`; None if scales follow from all entries."""
    results: dict[Path, tuple[Any, Seen | None]] = {path: (x, None) for path, x in state.items()}
    narrow: dict[Path, Choice] = {}
    for path, x in state.items():
        if not is_stored(x):
            continue
        moment, inner = moment_of(x), _scaled_array(x)
        bits, axes = format_of(moment.dtype).exponent_bits, _own_axes(moment, inner)
        if bits >= 8 or moment.block is not None or not is_sampled(inner.shape, axes):
            continue
        results[path] = (x, ())
        if bits < 5:
            rows = _largest_bits(inner.data, axes[-1:])
            narrow[path] = inner.size, (moment, axes), (rows, inner.scale)
    for path, (scale, *seen) in _in_groups(_see, narrow).items():
        x = state[path]
        inner = ScaledArray(_scaled_array(x).data, scale)
        results[path] = SquareRoot(inner) if isinstance(x, SquareRoot) else inner, tuple(seen)
    return results


def _see(
    moment: Moment, axes: Sequence[int], rows: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the scale of an array, and its `Seen`, from the largest bits of its rows."""
    # The barrier makes all uses of the data wait for its maximum. Otherwise XLA computes it in the
    # kernel that writes the new weights, and needs one more pass to write the moment.
    code, scale = lax.optimization_barrier((jnp.max(rows, axes).reshape(scale.shape), scale))
    largest = widen(lax.bitcast_convert_type(code, moment.dtype))
    # Only entries that exceeded their headroom reach the highest binade.
    grew = largest >= 2.0 ** _highest_exponent(moment.dtype)
    biased = lax.bitcast_convert_type(largest * scale, jnp.int32) >> 23
    return scale, biased, jnp.where(grew, _ROOM_AFTER_GROWTH, _ROOM_NARROW)


def _in_groups(choose: Callable[..., Any], choices: dict[Path, Choice]) -> dict[Path, Any]:
    """Return ``choose(*static, *operands)`` for each choice.

    On a GPU, arrays of the same kind in several layers go through one call, because the small
    kernels of one array take as long as those of many.
    """
    if jax.default_backend() == "cpu":
        return {path: choose(*static, *xs) for path, (_, static, xs) in choices.items()}
    results: dict[Path, Any] = {}
    groups: dict[Any, list[tuple[Path, Any]]] = {}
    for path, (size, static, operands) in choices.items():
        name, types = jax.tree_util.keystr(path), str(jax.tree.map(jax.typeof, operands))
        # Only the numbers of layers may differ: arrays of other names may be sharded differently.
        name = re.sub(r"\d+", "", name) if size <= _GROUPED_ENTRIES else name
        groups.setdefault((name, static, types), []).append((path, operands))
    for (_, static, _), members in groups.items():
        for start in range(0, len(members), _GROUP):
            paths, own = zip(*members[start : start + _GROUP], strict=True)
            stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *own)
            found = jax.vmap(functools.partial(choose, *static))(*stacked)
            results |= {p: jax.tree.map(operator.itemgetter(k), found) for k, p in enumerate(paths)}
    return results


def gather_scales(tree: Any) -> Any:
    """Return a tree with the same scales, all taken from one vector.

    Otherwise a GPU copies each donated scale before its successor is written.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_scaled)
    scales = {i: x.scale for i, x in enumerate(leaves) if is_scaled(x) and x.scale is not None}
    own = [i for i, x in scales.items() if x.ndim == 0 and x.dtype == jnp.float32]
    if not own or jax.default_backend() == "cpu":
        return tree
    vector = lax.optimization_barrier(jnp.stack([scales[i] for i in own]))
    for k, i in enumerate(own):
        leaves[i] = ScaledArray(leaves[i].data, vector[k])
    return jax.tree.unflatten(structure, leaves)


def store_all(
    before: dict[Path, tuple[Any, Seen | None]], arrays: dict[Path, Any], key: jax.Array | None
) -> dict[Path, Any]:
    """Call `store` for each array, in the format that it had before, as `inspect` returned it."""
    choices: dict[Path, Choice] = {}
    moments = {path: moment_of(stored) for path, (stored, _) in before.items()}
    for path, moment in moments.items():
        x, seen = arrays[path], before[path][1]
        if format_of(moment.dtype).exponent_bits < 8 and (moment.block is None or not x.ndim):
            x, axes = x.astype(jnp.float32), _own_axes(moment, x)
            parts = [x] if seen is None else sample(x, axes)
            choices[path] = x.size, (moment, axes, seen is not None), (parts, seen or ())
    scales, keys = _in_groups(_choose_scale, choices), split_key(key, moments)
    return {
        path: store(moment, arrays[path], keys.get(path), scales.get(path))
        for path, moment in moments.items()
    }


# Under jit, so that the many arrays of equal shape are traced only once.
@functools.partial(jax.jit, static_argnums=0)
def store(
    moment: Moment, x: jax.Array, key: Any = None, scale: jax.Array | None = None
) -> ScaledArray | SquareRoot:
    """Round an array of state once to its storage format; to nearest without a key.

    An entry that is not finite becomes NaN, as do all entries whose scale depends on it.
    """
    fmt, x = format_of(moment.dtype), lax.convert_element_type(x, jnp.float32)
    y, block = lax.sqrt(lax.abs(x)) if moment.root else x, None
    if fmt.exponent_bits < 8:
        if moment.block is not None and x.ndim:
            block = (1,) * (x.ndim - 1) + (moment.block,)
        if scale is None:
            scale = _choose_scale(moment, _own_axes(moment, x), False, [x])
        # 1 / scale, in integer arithmetic that XLA repeats in every kernel that uses it.
        bits = (254 << 23) - lax.bitcast_convert_type(scale, jnp.int32)
        inverse = lax.bitcast_convert_type(bits, jnp.float32)
        y = y * to_float(ScaledArray(x, inverse, block_shape=block).full_scale)
        y = lax.max(y, jnp.float32(fmt.smallest_subnormal)) if moment.root else y
    y = lax.sign(x) * y if moment.root else y
    data = (round_finite if fmt.exponent_bits < 8 else _round)(y, moment.dtype, key)
    stored = ScaledArray(data, scale, block_shape=block)
    return SquareRoot(stored) if moment.root else stored


def _own_axes(moment: Moment, x: Any) -> tuple[int, ...]:
    """Return the axes along which entries share a scale, blocks aside."""
    return tuple(range(moment.stack_axes, jnp.ndim(x)))


def _choose_scale(
    moment: Moment, axes: Sequence[int], is_sample: bool, parts: Any, seen: Any = ()
) -> jax.Array:
    """Return scales, powers of two; NaN if an entry that they depend on is not finite."""
    if moment.block is not None and parts[0].ndim:
        (x,) = parts
        x = lax.pad(
            x, x.dtype.type(0), [(0, 0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % moment.block, 0)]
        )
        largest = _largest_bits(x.reshape(*x.shape[:-1], -1, moment.block), (x.ndim,))[..., 0]
    else:
        largest = functools.reduce(lax.max, [_largest_bits(part, axes) for part in parts])
        largest = largest if moment.stack_axes else largest.reshape(())
    # In integers, because XLA needs more kernels to do the same in float32. Round as the format
    # does, so that a value that rounds up to a power of two counts as one, and storing a loaded
    # array changes nothing. Squares of roots round up at half the distance.
    bits = format_of(moment.dtype).mantissa_bits - moment.root
    biased = ((largest + jnp.uint32(1 << (22 - bits))) >> 23).astype(jnp.int32)
    biased = (biased + 127) >> 1 if moment.root else biased
    zero, infinity = (63, 191) if moment.root else (0, 255)  # as above
    # Map the power of two above the largest magnitude to the largest power of two of the format.
    above = 1 - _highest_exponent(moment.dtype)
    room, unseen = (_ROOM, 127 + _EXPONENT_OF_UNSEEN) if is_sample else (0, 127 - above)
    if seen:
        biased, room = lax.max(biased, seen[0]), seen[1]
    is_finite = biased < infinity
    biased = lax.select(biased == zero, lax.full_like(biased, unseen), biased) + (room + above)
    scale = lax.bitcast_convert_type(lax.clamp(1, biased, 253) << 23, jnp.float32)
    return lax.select(is_finite, scale, lax.full_like(scale, jnp.nan))


def _highest_exponent(dtype: Any) -> int:
    return math.frexp(format_of(dtype).max)[1] - 1


def _largest_bits(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Return the bits of the largest magnitudes over axes, which stay with size 1."""
    if x.dtype.itemsize > 1:
        return lax.bitcast_convert_type(amax(x, tuple(axes)), jnp.uint32)
    # Integers order magnitudes as floats do, with NaN above infinity.
    magnitudes = lax.bitcast_convert_type(x, jnp.uint8) & jnp.uint8(0x7F)
    return jnp.max(magnitudes, axes, keepdims=True)


def is_sampled(shape: tuple[int, ...], axes: Sequence[int]) -> bool:
    """Return whether scales that entries along ``axes`` share are chosen from a sample."""
    items = math.prod(n for axis, n in enumerate(shape) if axis not in axes)
    return math.prod(shape) > max(_UNSAMPLED, _ITEM_SAMPLE * items)


def sample(x: Any, axes: Sequence[int]) -> list[Any]:
    """Return evenly spaced rows and columns of a large array, and all of a small one.

    Rows alone could all belong to one channel of a flattened image. There are fewer columns,
    because reading one entry of a column costs 32 bytes of memory traffic.
    """
    if not is_sampled(x.shape, axes):
        return [x]
    parts = [_thin(x, axes, _ROW_SAMPLE)]
    if x.ndim - 1 in axes:  # else columns have scales of their own
        stride = max(1, min(x.shape[-1], x.size // _COLUMN_SAMPLE))
        parts.append(_thin(x[..., ::stride], axes, _UNSAMPLED))
    return parts


def _thin(x: Any, axes: Sequence[int], entries: int) -> Any:
    """Return at most ``entries`` evenly spaced entries, thinned out along the first axes first."""
    items = math.prod(n for axis, n in enumerate(x.shape) if axis not in axes)
    entries, size, strides = max(entries, _ITEM_SAMPLE * items), x.size, [1] * x.ndim
    for axis in axes:
        others = size // x.shape[axis]
        strides[axis] = -(-x.shape[axis] // max(1, entries // others))
        size = others * -(-x.shape[axis] // strides[axis])
    return x[tuple(slice(None, None, stride) for stride in strides)]


def round_finite(x: jax.Array, dtype: Any, key: Any = None) -> jax.Array:
    """Round float32 and saturate; infinity becomes NaN (a `cast` that saturates keeps it)."""
    largest = x.dtype.type(format_of(dtype).max)
    return _round(lax.clamp(-largest, x + (x - x), largest), dtype, key)


def _round(x: jax.Array, dtype: Any, key: Any) -> jax.Array:
    return cast(x, dtype, "nearest" if key is None else "stochastic", key, saturate=False)


def scale_weight(x: Any, dtype: Any, stack_axes: int | None = None) -> Any:
    """Return a parameter as a ScaledArray whose data, or each item of it, has an RMS near 1."""
    value = widen(x.value if is_scaled(x) else jnp.asarray(x))
    stack = max(value.ndim - 2, 0) if stack_axes is None else min(stack_axes, value.ndim)
    size = rms(value, tuple(range(stack, value.ndim)) if stack else None)
    scale = jnp.where(size > 0, scale_near(size), _SCALE_OF_ZEROS)
    return ScaledArray(cast(value / scale, dtype), scale)


def add_updates(
    weights: dict[Path, Any], updates: Sequence[Any], key: jax.Array | None
) -> list[Any]:
    """Return each weight plus its update, rounded once into the format of the weight."""
    choices: dict[Path, Choice] = {}
    for (path, w), update in zip(weights.items(), updates, strict=True):
        scale = w.scale if is_scaled(w) and w.block_shape is None else None
        if scale is None or scale.dtype.itemsize == 1:  # a factor may not fit 8 bits
            continue
        if w.size and update is not None:
            axes = tuple(a for a, n in enumerate(scale.shape or (1,) * w.ndim) if n == 1)
            choices[path] = w.size, (axes,), (sample(w.data, axes), scale)
    factors, keys = _in_groups(_scale_change, choices), split_key(key, weights)
    return [
        w if update is None else _add_update(w, update, keys.get(path), factors.get(path))
        for (path, w), update in zip(weights.items(), updates, strict=True)
    ]


@jax.jit  # see `store`
def _add_update(weight: Any, update: Any, key: Any, factor: jax.Array | None) -> Any:
    if weight is None:
        return None
    update = update.value if is_scaled(update) else update
    if not is_scaled(weight) and not is_floating(weight):
        return lax.convert_element_type(weight + update, weight.dtype)
    total = widen(weight.value if is_scaled(weight) else weight)
    total = total + lax.convert_element_type(update, total.dtype)
    if not is_scaled(weight) or weight.scale is None:
        data = round_finite(total, weight.dtype, key)
        return ScaledArray(data) if is_scaled(weight) else data
    scale, block = weight.scale, weight.block_shape
    if factor is not None:
        scale = scale * lax.convert_element_type(factor, scale.dtype)
    full = ScaledArray(weight.data, scale, block_shape=block).full_scale
    data = round_finite(total / to_float(full), weight.dtype, key)
    return ScaledArray(data, scale, block_shape=block)


def _scale_change(axes: Sequence[int], parts: Any, scale: jax.Array) -> jax.Array:
    """Return the factor from an old scale to a new: 1 unless the old RMS is outside [1/2, 2]."""
    sizes = (rms(part, axes).reshape(scale.shape) for part in parts)
    size = lax.convert_element_type(functools.reduce(lax.max, sizes), jnp.float32)
    moved = ((size < 0.5) & (size >= 2.0**-126)) | ((size > 2) & (size <= 2.0**126))
    # The power of two nearest to such a size: `scale_near` in fewer operations.
    bits = (lax.bitcast_convert_type(size, jnp.int32) + (1 << 22)) & (255 << 23)
    return lax.select(moved, lax.bitcast_convert_type(bits, jnp.float32), jnp.ones_like(size))
