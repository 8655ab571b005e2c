"""Tracing a user's function, with an answer for the functions that have no graph."""

from collections.abc import Callable
from typing import Any

import jax


def traced(where: str, fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Returns the closed jaxpr of a function, and the types of its outputs as a tree.

    Raises:
        TypeError: if ``fn`` is no function of arrays that JAX can trace.
        ValueError: if it has side effects, which an analysis would repeat or lose.

    Example:
        >>> closed, out = traced("example", lambda x: {"y": x + 1}, 1.0)
        >>> out["y"].shape
        ()
    """
    if not callable(fn):
        raise TypeError(
            f"unitscale.analysis.{where}: expected a function; got {type(fn).__name__}. Pass the "
            "function itself, and its arguments after it."
        )
    try:
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    except jax.errors.JAXTypeError as error:
        raise TypeError(
            f"unitscale.analysis.{where}: expected a function that JAX can trace; got one that "
            f"needs the values of its arguments ({_first_line(error)}). Close over what must be "
            "static, and use jax.lax.cond or jnp.where for choices."
        ) from error
    except TypeError as error:
        if "abstract array" not in str(error) and "JAX type" not in str(error):
            raise
        raise TypeError(
            f"unitscale.analysis.{where}: expected arrays as arguments and results; got something "
            f"else ({_first_line(error)}). Close over what is no array."
        ) from error
    if closed.effects:
        # An effect on a Ref goes on to tell its address.
        words = (str(effect).split("<")[0] or type(effect).__name__ for effect in closed.effects)
        names = ", ".join(sorted(set(words)))
        raise ValueError(
            f"unitscale.analysis.{where}: expected a function without side effects; got one with "
            f"{names}. Remove jax.debug.print, callbacks and Refs from it for this."
        )
    return closed, out


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
