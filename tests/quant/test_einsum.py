"""Einsum strings as contractions."""

import numpy as np
import pytest

from unitscale.quant import Contraction, einsum_contraction, einsum_problem


@pytest.mark.parametrize(
    ("subscripts", "rank", "wanted"),
    [
        ("btk,kn->btn", 3, Contraction("btk", "kn", "btn")),
        ("b t k, k h d -> b t h d", 3, Contraction("btk", "khd", "bthd")),
        ("...k,kn->...n", 3, Contraction("ABk", "kn", "ABn")),
        ("...k,kn->...n", 1, Contraction("k", "kn", "n")),
        ("A...k,kn->A...n", 4, Contraction("ABCk", "kn", "ABCn")),
        ("bk,bkn->nb", 2, Contraction("bk", "bkn", "nb")),
    ],
)
def test_contractions(subscripts: str, rank: int, wanted: Contraction) -> None:
    assert einsum_problem(subscripts) == ""
    spec = einsum_contraction(subscripts, rank)
    assert spec == wanted
    size = {c: i + 2 for i, c in enumerate(sorted(set(spec.lhs + spec.rhs)))}
    draw = np.random.default_rng(0).normal
    lhs, rhs = (draw(size=[size[c] for c in labels]) for labels in (spec.lhs, spec.rhs))
    np.testing.assert_array_equal(
        np.einsum(f"{spec.lhs},{spec.rhs}->{spec.out}", lhs, rhs), np.einsum(subscripts, lhs, rhs)
    )


@pytest.mark.parametrize(
    ("subscripts", "problem"),
    [
        ("ab,bc", "no ->"),
        ("ab,...bc->...ac", "an ellipsis"),
        ("...ab,bc->ac", "an ellipsis"),
        ("aab,bc->ac", "repeats a label"),
        ("ab,bc->a", "'c' in one term only"),
        ("abd,bc->ac", "'d' in one term only"),
    ],
)
def test_problems(subscripts: str, problem: str) -> None:
    assert problem in einsum_problem(subscripts)
