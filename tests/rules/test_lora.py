import numpy as np
import pytest

from tests.refusals import refuses
from unitscale import rules


@pytest.mark.parametrize(("batch", "n_in", "rank", "n_out"), [(8, 16, 4, 32), (64, 48, 8, 4)])
def test_lora_is_unit_and_its_input_gradient_has_the_factor_of_dense(
    batch, n_in, rank, n_out, assert_unit
) -> None:
    down, up = rules.lora(n_in, rank, n_out, batch)

    def trial(rng):
        shapes = ((50, batch, n_in), (50, n_in, rank), (50, rank, n_out), (50, batch, n_out))
        x, a, b, dy = (rng.standard_normal(s) for s in shapes)
        h = down.fwd * x @ a
        dh = up.bwd[0] * dy @ b.swapaxes(-1, -2)
        return (
            h,
            up.fwd * h @ b,
            dh,
            down.bwd[1] * x.swapaxes(-1, -2) @ dh,
            up.bwd[1] * h.swapaxes(-1, -2) @ dy,
        )

    assert_unit(trial, trials=200)
    for constraint in ("to_output_scale", "to_grad_input_scale", "gmean", None):
        down, up = rules.lora(n_in, rank, n_out, batch, constraint=constraint)
        dense = rules.dense(n_in, n_out, batch, constraint=constraint)
        # Beside the dense layer both paths have the same ratio of backward to forward.
        ratio = down.bwd[0] * up.bwd[0] / (down.fwd * up.fwd)
        assert ratio == pytest.approx(dense.bwd[0] / dense.fwd, rel=1e-12)
        assert np.isclose(down.fwd * up.fwd, dense.fwd * rank**-0.5)


test_errors = refuses(
    [
        (ValueError, lambda: rules.lora(4, 0, 4, 4), r"rules\.lora: rank must be"),
        (ValueError, lambda: rules.lora(0, 2, 4, 4), r"in_features must be"),
    ]
)
