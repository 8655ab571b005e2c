"""What differs between the versions of JAX that the library runs on, and what they keep private."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jax._src import core as jax_core, dtypes as jax_dtypes
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn


def take_as_array(
    cls: type, convert: Callable[[Any], Any], convert_loss: Callable[[Any], Any]
) -> None:
    """Lets JAX's primitives take an object of a class for the array that ``convert`` makes of it.

    Where it raises ValueError (JAX hides a TypeError), that is what the user sees; JAX's own
    message names neither the class nor what to do. ``convert_loss`` is asked in its place for what
    `jax.grad` differentiates. There is no public place for either; where a version of JAX has none
    of these, its own message stands.
    """
    types = getattr(jax_core, "pytype_aval_mappings", None)
    if isinstance(types, dict):
        types[cls] = lambda x: jax_core.typeof((convert_loss if _is_loss() else convert)(x))
    register = getattr(jax_dtypes, "register_canonicalize_value_handler", None)
    if register is not None:
        register(cls, convert)


def _is_loss() -> bool:
    """Whether `jax.grad` asks `take_as_array`, through `typeof`, if the loss is a scalar."""
    return sys._getframe(3).f_code.co_name == "_check_scalar"


# The mirror images of comparisons; those of other operators have an r before their names.
_MIRRORS = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


def mirror_asked_for() -> str:
    """The method to answer an operator of `jax.Array` that asks the caller, its right operand.

    "__radd__" for an addition, "" where none asks. Operators ask for ``__jax_array__`` and then
    answer themselves; to an operand without it they leave the answer, as Python means it. There is
    no public way to say so; where a version of JAX has other names, they answer with a plain array.
    """
    asks, _, name = sys._getframe(2).f_code.co_name.partition("_operator_")
    return "" if asks or not name else f"__{_MIRRORS.get(name, 'r' + name)}__"


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the numbers of constants and of carried leaves of a scan, from its parameters."""
    if "num_consts" in params:  # before JAX 0.12
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())
    return consts, carry


@contextmanager
def cudnn_of(capability: tuple[int, int], version: int) -> Iterator[None]:
    """Within the block, what is traced for cuDNN attention is checked against this GPU and cuDNN.

    JAX asks the GPU of this machine, which one that compiles ahead of time need not have. There is
    no public way to name another; where a version of JAX has no such checks, nothing is changed.
    """

    def of(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split("."))

    answers = {
        "check_cudnn_version": lambda: version,
        "check_compute_capability": lambda least: capability >= of(least),
        "is_cuda_compute_capability_equal": lambda other: capability == of(other),
    }
    own = {name: getattr(jax_cudnn, name) for name in answers if hasattr(jax_cudnn, name)}
    for name in own:
        setattr(jax_cudnn, name, answers[name])
    try:
        yield
    finally:
        for name, check in own.items():
            setattr(jax_cudnn, name, check)
