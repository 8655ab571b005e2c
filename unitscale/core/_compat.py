"""What differs between the versions of JAX that the library runs on, and what they keep private."""

from typing import Any

from jax._src import core as jax_core, dtypes as jax_dtypes


def refuse_as_array(cls: type, message: str) -> None:
    """Lets JAX say ``message`` where one of its primitives is given an object of a class.

    Its own message names neither the class nor what to do. There is no public place for another;
    where a version of JAX has none of these, its own stands.
    """

    def refuse(x: Any) -> Any:
        raise ValueError(message.format(x))  # as JAX does; it hides a TypeError

    types = getattr(jax_core, "pytype_aval_mappings", None)
    if isinstance(types, dict):
        types[cls] = refuse
    register = getattr(jax_dtypes, "register_canonicalize_value_handler", None)
    if register is not None:
        register(cls, refuse)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the numbers of constants and of carried leaves of a scan, from its parameters."""
    if "num_consts" in params:  # before JAX 0.12
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())
    return consts, carry
