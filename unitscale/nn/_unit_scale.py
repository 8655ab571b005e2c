"""A plain `flax.nnx` model with its layers unit-scaled.

What a module does between its layers is Python code, which nobody can see from outside: residual
sums, activations and losses stay as they are, and the report says so.
"""

import dataclasses
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from flax import nnx

from ._hooks import children_of, joined
from ._policy import PolicyLike, as_policy
from ._unit_scale_layers import KINDS, OTHERS, Options, linear, obstacle, variables_of

Model = TypeVar("Model")
UNSEEN = "not seen, and as before: activations, sums (residual ones too) and losses between layers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rescaled:
    """What became of one layer.

    Attributes:
        path: dotted path of the layer; "" for the model itself.
        kind: its class before.
        became: its class now, of `unitscale.nn`; "" if it was left alone.
        reason: why it was left alone, or what changed; "" if nothing needs saying.

    Example:
        >>> Rescaled(path="head", kind="Linear", became="Dense", reason="").became
        'Dense'
    """

    path: str
    kind: str
    became: str
    reason: str


@dataclasses.dataclass(frozen=True)
class UnitScaleReport:
    """What `unit_scale` did to each layer. Printed, it is a table.

    Attributes:
        layers: one entry for each layer with parameters or dropout, and each module with
            parameters of its own, in the order of their paths.

    Example:
        >>> UnitScaleReport(()).changed
        ()
    """

    layers: tuple[Rescaled, ...]

    @property
    def changed(self) -> tuple[str, ...]:
        """Paths of the layers that are unit-scaled now."""
        return tuple(layer.path for layer in self.layers if layer.became)

    @property
    def skipped(self) -> dict[str, str]:
        """Paths of the other layers, and why."""
        return {layer.path: layer.reason for layer in self.layers if not layer.became}

    def __str__(self) -> str:
        """A summary, one row for each layer, and what no row can say."""
        rows = [("layer", "class", "now", "why not, or what else")]
        rows += [(x.path, x.kind, x.became or "as before", x.reason) for x in self.layers]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        count = f"{len(self.changed)} of {len(self.layers)} layers unit-scaled"
        return "\n".join([count, *lines, UNSEEN])


def unit_scale(
    model: Model,
    *,
    policy: PolicyLike = "float32",
    keep_function: bool = False,
    readout: Sequence[str] = (),
    max_length: int | None = None,
    rngs: nnx.Rngs | None = None,
) -> tuple[Model, UnitScaleReport]:
    """Returns a plain `flax.nnx` model with its layers unit-scaled, layer by layer.

    Scaling:
        Each layer becomes its twin of `unitscale.nn`, and returns a plain array. Its parameters are
        drawn anew, or with ``keep_function`` are those of the model divided by the layer's forward
        factor: ``kernel * in^1/2`` for a Linear, of unit variance where the model is as it was
        initialised. Tables of embeddings then stay as they are, whatever their variance. What
        stands between layers is not seen: residual sums, activations and losses stay as they are;
        write those with `unitscale.ops`.

        Backward factors suit a loss that uses each layer once, and is differentiated by parameters.
        A loss that uses layers on inputs of several sizes is traced within `unitscale.batch_size`.
        One that holds a gradient by an input, as forces and gradient penalties are, needs plain
        layers: of unit-scaled ones it is a multiple of the derivative.

        The twins are called as flax's layers are, with the input in its place, but norms take no
        ``mask=``, attention no ``sow_weights=``, ``is_causal=`` and ``decode=True``, an Einsum no
        equation of a call, and `attend` of an Embed no ``out_sharding=``.

    Args:
        model: a module, which is not changed.
        policy: formats of the new layers; a `Policy` or the name of a preset. A dtype that a
            layer has of its own takes its place.
        keep_function: whether the new model computes what the old one does.
        readout: patterns (`fnmatch`) of paths of `nnx.Linear` that make logits and become
            `Readout`.
        max_length: number of keys that the factor of attention is computed for; by default that of
            each call. With ``keep_function`` attention needs it.
        rngs: streams of random keys that parameters are drawn from; needed unless the function is
            kept.

    Returns:
        The new model, and what became of each layer, and why.

    Raises:
        ValueError: if there are no rngs to draw from, a pattern matches no `nnx.Linear`, or the
            policy is unknown.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.relu)
        >>> scaled, report = unit_scale(model, keep_function=True)
        >>> report.changed
        ('layers.0',)

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, section 4 (how to apply it).
    """
    if rngs is None and not keep_function:
        raise ValueError(
            "unitscale.nn.unit_scale: give rngs=, which new parameters are drawn from, or "
            "keep_function=True"
        )
    policy = as_policy(policy)
    rngs = nnx.Rngs(0) if rngs is None else rngs
    entries: list[Rescaled] = []
    known: dict[int, tuple[Any, Any]] = {}  # with the old one, whose id nobody else then gets
    used: set[str] = set()

    def shared(layer: Any) -> str:
        """Which parameter another layer has too, as a twin of each would not; or nothing."""
        found = (places[id(variable)] for _, variable in variables_of(layer))
        return next((f"{both[0]} is {both[1]} too" for both in found if len(both) > 1), "")

    def converted(node: Any, path: str) -> Any:
        """The node's replacement, or the node, with what lies below it replaced."""
        if id(node) in known:
            return known[id(node)][1]
        known[id(node)] = node, node
        convert = KINDS.get(type(node))
        if convert is None and not isinstance(node, (*KINDS, *OTHERS)):
            children = children_of(node)
            own = [str(name) for name, child in children if isinstance(child, nnx.Param)]
            if own:
                note = f"its own {', '.join(own)}: write what it computes with unitscale.ops"
                entries.append(
                    Rescaled(path=path, kind=type(node).__name__, became="", reason=note)
                )
            replaced = {
                name: new
                for name, child in children
                if (new := converted(child, joined(path, name))) is not child
            }
            known[id(node)] = node, _with(node, replaced)
            return known[id(node)][1]
        found = f"{type(node).__name__} is not converted" if convert is None else ""
        matched = {p for p in readout if fnmatchcase(path, p)} if convert is linear else set()
        used.update(matched)
        found = found or shared(node) or obstacle(node)
        if convert is not None and not found:
            options = Options(policy, keep_function, max_length, bool(matched), rngs)
            found = convert(node, options)
        new, reason = found if isinstance(found, tuple) else (found, "")
        if isinstance(new, str):
            new, reason = node, new
        known[id(node)] = node, new
        became = "" if new is node else type(new).__name__.lstrip("_")
        entries.append(Rescaled(path=path, kind=type(node).__name__, became=became, reason=reason))
        return new

    copy = nnx.clone(model)
    places: dict[int, list[str]] = {}
    for place, variable in variables_of(copy):
        places.setdefault(id(variable), []).append(place)
    copy = converted(copy, "")
    if unmatched := [p for p in readout if p not in used]:
        raise ValueError(
            f"unitscale.nn.unit_scale: readout must match paths of nnx.Linear; {unmatched[0]!r} "
            f"matches none of {', '.join(e.path for e in entries if e.kind == 'Linear')}"
        )
    return copy, UnitScaleReport(tuple(entries))


def _with(node: Any, replaced: dict[Any, Any]) -> Any:
    """A module or container with some of its children replaced, in place where it can be."""
    if isinstance(node, tuple):
        children = [replaced.get(i, child) for i, child in enumerate(node)]
        return getattr(node, "_make", tuple)(children) if replaced else node
    for name, new in replaced.items():
        if isinstance(node, nnx.Pytree):
            setattr(node, str(name), new)
        else:
            node[name] = new
    return node
