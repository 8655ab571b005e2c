"""Random programs: what is right agrees, what is wrong is found and made small."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from recipes.bench import fuzz
from recipes.bench._grammar import Input, Program
from recipes.bench._shrink import smaller

ONES = Input(np.asarray([[1.5, -2.0], [0.25, 3.0]], np.float16), np.float32(4.0))


def program(kind: str, *lines: str, **inputs: Input) -> Program:
    named = tuple((f"v{i}", text) for i, text in enumerate(lines))
    return Program(kind, {"i0": ONES, **inputs}, named)


def test_a_number_names_a_program() -> None:
    first, again, other = fuzz.draw(0, 3), fuzz.draw(0, 3), fuzz.draw(1, 3)
    assert first.source() == again.source()
    assert fuzz.listing(first) == fuzz.listing(again) != fuzz.listing(other)


@pytest.mark.parametrize(
    "tried",
    [
        program("scalify", "jnp.tanh(i0)", "v0 @ i0"),
        program("operators", "i0 * 2 + 1", "v0.sum(-1)"),
        program("ops", "ops.gelu(i0)"),
        program("quant", "product(i0, i0)"),
        program("control", "lax.scan(lambda c, v: (c * 0.5 + v, c), i0[0], i0)[1]"),
    ],
    ids=lambda p: p.kind,
)
def test_what_is_right_agrees(tried: Program) -> None:
    assert fuzz.check(tried) is None


def test_what_is_wrong_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sine that is wrong, in the middle of a program."""
    wrong = {**fuzz.SCALED, "jnp": _Wrong()}
    monkeypatch.setattr(fuzz, "SCALED", wrong)
    tried = program("operators", "i0 + 1", "jnp.sin(v0)", "v1 * 3", "abs(i1)", i1=ONES)
    assert fuzz.check(tried)
    small = smaller(tried, fuzz.check)
    assert [text for _, text in small.lines] == ["jnp.sin(i0)"]
    assert list(small.inputs) == ["i0"]
    assert small.inputs["i0"].data.shape == (1, 1)


class _Wrong:
    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    def sin(self, x: Any) -> Any:
        return jnp.sin(x) * 1.25


def test_what_no_law_holds_for_is_left_out() -> None:
    far = replace(ONES, scale=np.float32(2.0**60))
    assert fuzz.check(program("scalify", "i0 * i0 * i0", i0=far)) == ""
    assert fuzz.check(program("scalify", "i0 @ i0[0, 0]")) == ""


def test_a_listing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(fuzz.listing(program("scalify", "jnp.tanh(i0)")), {})
    assert "ScaledArray(float16[2,2]" in capsys.readouterr().out
