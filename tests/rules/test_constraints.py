"""The closed set of constraints."""

import pytest
from hypothesis import given, strategies as st

from unitscale.rules import constrain


@pytest.mark.parametrize(
    ("constraint", "factors", "expected"),
    [
        ("to_output_scale", (8.0, 2.0), 8.0),
        ("to_grad_input_scale", (8.0, 2.0), 2.0),
        ("gmean", (8.0, 2.0), 4.0),
        ("hmean", (8.0, 2.0), 3.2),
        ("amean", (8.0, 2.0), 5.0),
        ("to_output_scale", (8.0, 2.0, 4.0), 8.0),
        ("to_left_grad_scale", (8.0, 2.0, 4.0), 2.0),
        ("to_right_grad_scale", (8.0, 2.0, 4.0), 4.0),
        ("gmean", (8.0, 2.0, 4.0), 4.0),
        ("hmean", (8.0, 2.0, 4.0), 24 / 7),
        ("amean", (8.0, 2.0, 4.0), 14 / 3),
        ("amean", (8.0, 2.0, 4.0, 2.0), 4.0),
    ],
)
def test_table(constraint, factors, expected) -> None:
    assert constrain(constraint, *factors) == pytest.approx((expected,) * len(factors), rel=1e-15)


def test_none_changes_nothing() -> None:
    assert constrain(None, 8.0, 2.0, 4.0) == (8.0, 2.0, 4.0)


@given(
    st.sampled_from(["gmean", "hmean", "amean"]),
    st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=4),
)
def test_means_lie_between_the_factors_and_are_shared(constraint, factors) -> None:
    shared = constrain(constraint, *factors)
    assert len(shared) == len(factors)
    assert len(set(shared)) == 1
    assert min(factors) * (1 - 1e-12) <= shared[0] <= max(factors) * (1 + 1e-12)


def test_unknown_name_lists_the_set_and_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown constraint 'to_output'") as caught:
        constrain("to_output", 1.0, 1.0)
    assert "Did you mean 'to_output_scale'?" in str(caught.value)
    for name in ("to_left_grad_scale", "hmean", "None"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("constraint", "operands", "hint"),
    [
        ("to_grad_input_scale", 2, "use 'to_left_grad_scale' or 'to_right_grad_scale'"),
        ("to_left_grad_scale", 1, "use 'to_grad_input_scale'"),
        ("to_right_grad_scale", 1, "use 'to_grad_input_scale'"),
        ("to_right_grad_scale", 3, "use 'to_output_scale'"),
    ],
)
def test_name_for_another_number_of_operands_says_which_to_use(constraint, operands, hint) -> None:
    with pytest.raises(ValueError, match=hint):
        constrain(constraint, 1.0, *(1.0,) * operands)
