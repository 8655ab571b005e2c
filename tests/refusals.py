"""Tests from tables of calls that must raise errors."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

Refusal = tuple[type[Exception], Callable[..., object], str]


def refuses(table: Sequence[Refusal], *args: Any) -> Any:
    """Make a test that each call of a table raises its error with a matching message."""

    @pytest.mark.parametrize(("error", "call", "match"), table)
    def test(error: type[Exception], call: Callable[..., object], match: str) -> None:
        with pytest.raises(error, match=match):
            call(*args)

    return test
