"""Options of a call that a layer hands on."""

from typing import Any


def given(**options: Any) -> dict[str, Any]:
    """Returns the options that are not None.

    `nnx.tabulate` fails where a ScaledArray stands in a tuple of arguments, or beside a keyword,
    even one that is None; it shows one alone, and those that are all given by keyword.

    Example:
        >>> given(mask=None, deterministic=True)
        {'deterministic': True}
    """
    return {name: value for name, value in options.items() if value is not None}
