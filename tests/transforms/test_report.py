"""What a scaled program reports of itself."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unitscale import as_scaled
from unitscale.transforms import Exponent, scalify


def makers(function: Callable[..., Any], *args: Any) -> list[str]:
    return [e.maker for e in scalify(function).report(*args).exponents]


def test_exponents_are_arguments_and_what_is_decided_at_run_time() -> None:
    x = as_scaled(jnp.ones((4, 4)))
    y = as_scaled(jnp.ones((4, 4)), dtype=jnp.float16)
    assert makers(lambda a, b: a @ b * a, x, x) == ["argument", "argument"]
    assert makers(lambda a, b: a + b, x, x) == ["argument", "argument", "add"]
    assert makers(lambda a, b: jnp.tanh(a @ b + a), x, x) == ["argument", "argument"]
    assert makers(lambda a, b: a @ b + a, y, y) == ["argument", "argument", "result"]
    assert makers(lambda a, b: (a @ b + a) @ b, y, y)[2:] == [
        "dot_general",
        "result",
    ]
    assert makers(lambda a: jnp.exp(a), y) == ["argument", "result"]
    assert makers(jnp.linalg.cholesky, x) == ["argument", "cholesky"]
    assert makers(lambda a: lax.fori_loop(0, 3, lambda i, c: c @ a, a), y) == ["argument", "scan"]
    assert makers(jax.jit(lambda a: a @ (a @ a + 1.0)), y) == ["argument", "dot_general", "result"]


def test_a_chain_of_doubtful_results_is_measured_once() -> None:
    x = as_scaled(jnp.ones((4, 4)), dtype=jnp.float16)
    y = as_scaled(8 * jnp.ones((4, 4)), dtype=jnp.float16)

    def chain(a: jax.Array, b: jax.Array) -> jax.Array:
        c = (a + b) * (a - b) / (a * a + b)
        return c @ a + c @ b

    assert makers(chain, x, y) == ["argument", "argument", "dot_general", "result"]


def test_exponents_name_path_and_line() -> None:
    def program(batch: dict[str, jax.Array]) -> jax.Array:
        return (batch["x"] * 3.0 + batch["y"]) @ batch["y"]

    x = as_scaled(jnp.ones(3), dtype=jnp.float16)
    report = scalify(program).report({"x": x, "y": as_scaled(2 * jnp.ones(3), dtype=jnp.float16)})
    first, second, measured, left = report.exponents
    assert first == Exponent("argument", "[0]['x']", "given")
    assert second == Exponent("argument", "[0]['y']", "given")
    assert left == Exponent("result", "", "the size of its data")
    line = program.__code__.co_firstlineno + 1
    assert str(measured).startswith(f"dot_general at {__file__}:{line} (")
    assert str(report).splitlines()[0] == "exponent: argument at [0]['x']: given"
    assert repr(report) == "Report(0 default rules, 4 exponents)"


def test_exponents_say_why_they_are_known_at_run_time_only() -> None:
    x = as_scaled(jnp.ones((4, 4)))
    y = as_scaled(jnp.ones((4, 4)), dtype=jnp.float16)

    def reasons(function: Callable[..., Any], *args: Any) -> list[str]:
        return [e.reason for e in scalify(function).report(*args).exponents if e.reason != "given"]

    assert reasons(lambda a, b: a + b, x, x) == ["the larger of two"]
    carried = reasons(lambda a: lax.fori_loop(0, 3, lambda i, c: c @ a, a), y)
    assert carried == ["changes from turn to turn"]
    report = scalify(lambda a: {"loss": jnp.exp(a), "as it was": a}).report(y)
    assert report.exponents[1:] == [Exponent("result", "['loss']", "the size of its data")]
