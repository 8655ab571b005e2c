"""Tests from tables of calls that must raise errors."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

Error = type[Exception] | tuple[type[Exception], ...]
Refusal = tuple[Error, Callable[..., object], str]


def refuses(table: Sequence[Refusal], *args: Any) -> Any:
    """Make a test that each call of a table raises its error with a matching message."""

    @pytest.mark.parametrize(("error", "call", "match"), table)
    def test(error: Error, call: Callable[..., object], match: str) -> None:
        with pytest.raises(error, match=match):
            call(*args)

    return test
