"""Einsums of two operands as contractions."""

from string import ascii_uppercase

from ._contraction import Contraction, lone_labels, repeated_labels


def einsum_contraction(subscripts: str, lhs_rank: int) -> Contraction:
    """The contraction of an einsum; an ellipsis stands for labels of its own."""
    terms, _, out = subscripts.replace(" ", "").partition("->")
    lhs, rhs = terms.split(",")
    spare = "".join(c for c in ascii_uppercase if c not in subscripts)
    hidden = spare[: lhs_rank - len(lhs.replace("...", ""))]
    return Contraction(lhs.replace("...", hidden), rhs, out.replace("...", hidden))


def einsum_problem(subscripts: str) -> str:
    """Why an einsum is not one product of two matrices; "" if it is one."""
    terms, arrow, out = subscripts.replace(" ", "").partition("->")
    lhs, _, rhs = terms.partition(",")
    labels = [term.replace("...", "") for term in (lhs, rhs, out)]
    if not arrow or "..." in rhs or ("..." in lhs) != ("..." in out):
        return "its einsum_str has no ->, or an ellipsis that is not of the input and the result"
    if repeated_labels(*labels):
        return "its einsum_str repeats a label"
    if alone := lone_labels(*labels):
        return f"its einsum_str has {alone[0]!r} in one term only"
    return ""
