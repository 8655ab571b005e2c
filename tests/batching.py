"""Compute many results in one compiled program, because these tests mostly wait for compilation.

TABLE = {"sin": jnp.sin, "cos": jnp.cos}

@pytest.mark.parametrize("names", chunks(TABLE))
def test_functions(names) -> None:
    for name, got in compute({name: (TABLE[name], X) for name in names}).items():
        with entry(name):
            np.testing.assert_allclose(got, getattr(np, name)(X), rtol=1e-6)
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import pytest

Name = TypeVar("Name")


def chunks(names: Iterable[Any], size: int = 32) -> list[Any]:
    """Make the parameters of a test that checks several entries of a table at once."""
    names = list(names)
    parts = [names[i : i + size] for i in range(0, len(names), size)]
    return [pytest.param(part, id=f"{_text(part[0])}..{_text(part[-1])}") for part in parts]


def compute(table: Mapping[Name, tuple[Any, ...]]) -> dict[Name, Any]:
    """Return `{name: f(*args)}` for `{name: (f, *args)}`, compiled as one program.

    Arguments are traced, so they must be arrays, numbers or trees of these; bind static ones to the
    function. Read the results with NumPy, because `jnp` would compile more programs.
    """
    functions: dict[Name, Callable[..., Any]] = {name: row[0] for name, row in table.items()}

    def program(arguments: list[tuple[Any, ...]]) -> list[Any]:
        results = []
        for (name, f), args in zip(functions.items(), arguments, strict=True):
            with entry(name):
                results.append(f(*args))
        return results

    results = jax.jit(program)([row[1:] for row in table.values()])
    return dict(zip(table, results, strict=True))


@contextlib.contextmanager
def entry(name: Any) -> Iterator[None]:
    """Name the entry of the table in failures inside the block."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the entry {_text(name)} of the table")
        raise


def _text(name: Any) -> str:
    parts = name if isinstance(name, tuple) else (name,)
    return "-".join(str(getattr(part, "__name__", part)) for part in parts)
