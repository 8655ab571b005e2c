"""A run continued in other number formats: its state from those it was saved in.

What a step changes has another shape in other formats: a weight is an array or a ScaledArray, a
moment has its own format, delayed scales are there or not, layers are stacked or one by one, a
vocabulary is padded. Values are carried over, rounded once.
"""

from typing import Any

import jax
import jax.numpy as jnp

from unitscale import to_array
from unitscale.optim import ScaledTransformation, convert_state
from unitscale.quant import QuantState

from ..config import RunConfig
from .scaling import plain, scaled


def convert(
    state: Any,
    written: RunConfig,
    config: RunConfig,
    optimizer: Any,
    like: Any,
) -> Any:
    """The state of a run in the formats of its config."""
    source, target = plain(written.scalify, state), plain(config.scalify, like)
    params = to_array(source.params, jnp.float32)
    if isinstance(optimizer, ScaledTransformation):
        params = optimizer.scale_params(params)
    opt_state = convert_state(source.opt_state, optimizer.init(params))
    return scaled(
        config.scalify,
        target._replace(
            params=params,
            rest=_carried(source.rest, target.rest),
            opt_state=opt_state,
            step=source.step,
            auto=_kept(source.auto, target.auto),
            skips=_kept(source.skips, target.skips),
            loss_scale=_kept(source.loss_scale, target.loss_scale),
        ),
    )


def _kept(source: Any, target: Any) -> Any:
    """What only some runs have: that of the source, where both have it."""
    return target if source is None or target is None else source


def _carried(source: Any, target: Any) -> Any:
    """The target, with the value of every entry that the source has too taken from there.

    Scales of another strategy are none of its entries.
    """
    known = dict(jax.tree_util.tree_leaves_with_path(source, is_leaf=is_amax))

    def entry(path: Any, leaf: Any) -> Any:
        value = known.get(path, leaf)
        if is_amax(leaf):
            return value if value.strategy == leaf.strategy else leaf
        return value if value.dtype == leaf.dtype else value.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(entry, target, is_leaf=is_amax)


def is_amax(node: Any) -> bool:
    """Whether it is the scales of one product."""
    return isinstance(node, QuantState)


def reshaped(source: Any, like: Any) -> Any:
    """Arrays of layers one by one as those of a stack, or the other way, wherever trees have them.

    What lies below ``layers`` has the number of the layer as its next key, or it is stacked. Where
    an array is larger or smaller, that is by the zeros that a vocabulary is padded with.
    """
    known = {_keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(source)}

    def leaf_at(path: Any, leaf: Any) -> Any:
        keys = _keys(path)
        if keys in known:
            return _padded(known[keys], leaf)
        head, tail = keys[: keys.index("layers") + 1], keys[keys.index("layers") + 1 :]
        if is_stacked(path):
            return jnp.stack([known[(*head, str(i), *tail)] for i in range(leaf.shape[0])])
        return known[head + tail[1:]][int(tail[0])]

    return jax.tree_util.tree_map_with_path(leaf_at, like)


def is_stacked(path: Any) -> bool:
    """Whether the first axis of what lies at a path is that of layers."""
    keys = _keys(path)
    return "layers" in keys[:-1] and not keys[keys.index("layers") + 1].isdecimal()


def _padded(array: Any, like: Any) -> Any:
    """An array in the shape of another, of which it is a part, or the other way."""
    if array.shape == like.shape:
        return array
    part = array[tuple(map(slice, like.shape))]
    return jnp.pad(part, [(0, n - m) for n, m in zip(like.shape, part.shape, strict=True)])


def _keys(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
