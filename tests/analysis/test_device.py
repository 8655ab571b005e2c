from __future__ import annotations

import dataclasses

import pytest

from unitscale.analysis import H200

# NVIDIA's data sheet of the H200 SXM, without sparsity.
DATA_SHEET = {"f8": 1.979e15, "16": 0.989e15, "32": 0.495e15, "32 exact": 67e12, "64": 67e12}


def test_what_is_reached_is_less_than_the_data_sheet_says() -> None:
    for name, most in DATA_SHEET.items():
        assert most / 2 < H200.flops[name] < most
    assert DATA_SHEET["16"] / 5 < H200.attention < H200.flops["16"]
    assert 2.4e12 < H200.bandwidth < 4.8e12
    assert 225e9 < H200.link < 450e9


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"flops": {}}, "flops must have the formats f8, 16, 32, .*; got none"),
        ({"flops": {**H200.flops, "8": 1.0}}, "got f8, 16, .*, 8"),
        ({"flops": {**H200.flops, "16": 0.0}}, "16 must be positive; got 0.0"),
        ({"bandwidth": -1.0}, "bandwidth must be positive; got -1.0"),
        ({"link": float("nan")}, "link must be positive; got nan"),
        ({"start": 0.0}, "start must be positive; got 0.0"),
    ],
)
def test_a_figure_that_cannot_be_is_refused(changes: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"Device: .*{complaint}"):
        dataclasses.replace(H200, **changes)
