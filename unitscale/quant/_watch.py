"""A word to those whose delayed scales would stand still."""

import warnings
from typing import Any, TypeVar

import jax
from jax.custom_derivatives import SymbolicZero

from ._state import QuantState
from ._strategies import Delayed

T = TypeVar("T")


class StandingScalesWarning(UserWarning):
    """The loss was differentiated by operands of a product, and not by its `Delayed` scales.

    What a step saw of its tensors is the gradient of the `QuantState`: unless that is taken, the
    scales stay as they are while the tensors grow.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("ignore", StandingScalesWarning)  # if they are to stay
    """


@jax.custom_vjp
def _watched(operands: Any, tally: jax.Array) -> Any:
    del tally
    return operands


def _fwd(operands: Any, tally: Any) -> Any:
    leaves = jax.tree.leaves(operands, is_leaf=lambda x: hasattr(x, "perturbed"))
    if any(x.perturbed for x in leaves) and not tally.perturbed:
        warnings.warn(
            "unitscale: a loss was differentiated by the operands of a product with delayed "
            "scales, and not by the scales: they will stand still. Differentiate models by "
            "unitscale.nn.value_and_grad (nnx.value_and_grad does not record amax), and functions "
            "of a QuantState by it too. A DotGeneral that a layer makes anew in each call, as that "
            "of qkv_dot_general_cls=, keeps none: use unitscale.nn.convert.",
            StandingScalesWarning,
            stacklevel=2,
        )
    values = jax.tree.map(lambda x: x.value, operands, is_leaf=lambda x: hasattr(x, "perturbed"))
    return values, None


def _bwd(_: None, cotangents: Any) -> Any:
    is_zero = lambda x: isinstance(x, SymbolicZero)  # noqa: E731
    return jax.tree.map(lambda x: None if is_zero(x) else x, cotangents, is_leaf=is_zero), None


_watched.defvjp(_fwd, _bwd, symbolic_zeros=True)


def watched(operands: T, state: QuantState | None) -> T:
    """Returns the operands; warns if they are differentiated and delayed scales are not.

    Example:
        >>> watched((1.0, 2.0), None)
        (1.0, 2.0)
    """
    if state is None or not isinstance(state.strategy, Delayed):
        return operands
    return _watched(operands, state.tally)
