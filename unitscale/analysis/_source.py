"""Where an equation of a jaxpr came from: the op and the user's line."""

import os
import sys
from typing import Any, NamedTuple

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OPS = tuple(os.path.join(_LIBRARY, name) for name in ("ops/", "core/_factor.py"))
_NN = os.path.join(_LIBRARY, "nn", "")
_LAYERS = ("jax", "flax", "optax")


class Source(NamedTuple):
    """Where an equation came from.

    Attributes:
        op: name of the unitscale op that made it, or else of its primitive.
        line: ``file:line (function)`` of the user's code, or of the library's where only that is
            known; "" if nothing is.
        layer: classes of the unitscale layers between the two, the outermost first, as in
            ``"MLP/Dense"``; "" outside of layers.

    Example:
        >>> str(Source("dense", "model.py:12 (loss)", "MLP/Dense"))
        'dense of MLP/Dense at model.py:12 (loss)'
    """

    op: str
    line: str
    layer: str = ""

    def __str__(self) -> str:
        layer = f" of {self.layer}" if self.layer else ""
        return f"{self.op}{layer} at {self.line}" if self.line else f"{self.op}{layer}"


def _foreign() -> tuple[str, ...]:
    """Folders whose lines are not the user's."""
    packages = [sys.modules[name] for name in _LAYERS if name in sys.modules]
    return (_LIBRARY, *(path for package in packages for path in package.__path__))


def source_of(*eqns: Any) -> Source:
    """Returns the op and line of an equation, as its traceback shows them.

    Args:
        *eqns: the equation, and those of the calls that it is inside of, the innermost first: what
            is made inside of JAX's own functions gets the line of the call.

    Example:
        >>> import jax
        >>> source_of(jax.make_jaxpr(lambda x: x + 1)(1.0).eqns[0]).op
        'add'
    """
    source = _of_one(eqns[0])
    for eqn in eqns[1:]:
        if source.line:
            break
        source = _of_one(eqn)._replace(op=source.op)
    return source


def _of_one(eqn: Any) -> Source:
    traceback = eqn.source_info.traceback
    foreign = _foreign()
    op, library = _own_name(eqn), ""
    layers: list[str] = []
    for frame in traceback.frames if traceback is not None else ():
        name = frame.file_name
        where = f"{name}:{frame.line_num} ({frame.function_name})"
        if not name.startswith(foreign):
            return Source(op, where, "/".join(reversed(layers)))
        if name.startswith(_OPS) and not layers:
            # The outermost function of the ops is the one that was called: dense, not its helper.
            called = frame.function_name.split(".")[0]
            op = op if called.startswith("_") else called
        if name.startswith(_NN):
            kind = frame.function_name.split(".")[0]
            if kind[:1].isupper() and layers[-1:] != [kind]:
                layers.append(kind)
        if name.startswith(_LIBRARY):
            library = where
    return Source(op, library, "/".join(reversed(layers)))


def _own_name(eqn: Any) -> str:
    """The name of a function with derivatives of its own, or that of the primitive."""
    if not eqn.primitive.name.startswith("custom_"):
        return eqn.primitive.name
    inner = getattr(eqn.params.get("call_jaxpr"), "jaxpr", None)
    return inner.debug_info.func_name if inner is not None else eqn.primitive.name
