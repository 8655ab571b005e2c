"""Random programs: what is right agrees, and what no law holds for is left out."""

import jax.numpy as jnp
import numpy as np
import pytest

from recipes.bench import fuzz
from recipes.bench.fuzz import Input, Program

FOUR = np.float32(4.0)
ONES = Input(np.asarray([[1.5, -2.0], [0.25, 3.0]], np.float16), FOUR)
# Its square has an element that is 30 times smaller than its terms.
CANCELLING = [[1.2072396278381348, -0.41470029950141907, 1.1903159618377686]]
CANCELLING += [[-0.2203541249036789, 0.37884005904197693, -0.6576271057128906]]
CANCELLING += [[-1.5373873710632324, -0.023511821404099464, 1.396000862121582]]
EIGHT = np.asarray([[-0.40625, 0.9375, -0.0546875]], jnp.float8_e4m3fn)


def program(kind: str, *lines: str, **inputs: Input) -> Program:
    named = tuple((f"v{i}", text) for i, text in enumerate(lines))
    return Program(kind, {"i0": ONES, **inputs}, named)


def test_a_number_names_a_program() -> None:
    first, again, other = (fuzz.listing(fuzz.draw(seed, 3)) for seed in (0, 0, 1))
    assert first == again != other


RIGHT = [
    program("scalify", "jnp.tanh(i0)", "v0 @ i0"),
    program("ops", "ops.gelu(i0)", "v0.sum(-1)"),
    program("quant", "product(i0, i0)"),
    program("control", "lax.scan(lambda c, v: (c * 0.5 + v, c), i0[0], i0)[1]"),
    # An optimizer computes in float32.
    program("optim", "step('adagrad', i0, i0)", i0=Input(np.asarray([[0.1, 0.7]]), FOUR)),
    # What is rounded to 8 bits may lie on either side of what was not.
    program("quant", "q8(i0, 'e5m2')", "v0 > i0", i0=Input(np.float16([1.2041015625]), FOUR)),
    program("operators", "i0 @ i0", i0=Input(np.float32(CANCELLING))),
    # The magnitude of complex numbers is rounded.
    program("scalify", "jnp.abs(jnp.fft.fft(i0))", "jnp.minimum(v0, i0)", i0=Input(EIGHT, FOUR)),
    # E4M3 has no infinity.
    program("quant", "q8(i0)", "v0 + 1", i0=Input(np.float32([0.0, np.inf]), FOUR)),
    # A convolution multiplies NaN by the zeros beside an array.
    program("scalify", "jnp.convolve(i0, i0)", i0=Input(np.float32([1.0, np.nan, 1.0]), FOUR)),
    # Of NaN times what is no maximum the compiler makes zero.
    program("control", "i0.max(-1)", i0=Input(np.float32([[np.nan, 1.0]]), FOUR)),
]


@pytest.mark.parametrize("tried", RIGHT, ids=lambda p: f"{p.kind}: {p.lines[-1][1]}")
def test_what_is_right_agrees(tried: Program) -> None:
    assert fuzz.check(tried) is None


def test_what_no_law_holds_for_is_left_out() -> None:
    far = ONES._replace(scale=np.float32(2.0**60))
    assert fuzz.check(program("scalify", "i0 * i0 * i0", i0=far)) == ""
    assert fuzz.check(program("scalify", "i0 @ i0[0, 0]")) == ""
    assert fuzz.check(program("quant", "product(i0, i0[0])")) == ""
    # Zeros, too, have scales whose product is out of range.
    zeros = Input(np.zeros((2, 2), np.float32), np.float32(2.0**97))
    assert fuzz.check(program("operators", "i0 @ i0", i0=zeros)) == ""
