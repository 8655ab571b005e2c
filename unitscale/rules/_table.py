"""The rules as a table, for documentation.

The rows are read from the docstrings, so that a formula is written in one place and the table
cannot fall behind.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from ._add import add, weighted_add
from ._attention import dot_product_attention
from ._dropout import dropout
from ._elementwise import elementwise, glu
from ._embed import embed
from ._learning_rate import umup_learning_rate
from ._linear import conv, dense, matmul, readout
from ._lora import lora
from ._loss import mse_loss, softmax_cross_entropy
from ._moe import grouped_dense, mixture, router
from ._norm import norm
from ._pool import avg_pool, max_pool
from ._recurrent import gated_sum, gated_update, recurrent_kernel
from ._residual import residual, residual_taus
from ._softmax import softmax

_RULES: tuple[Callable[..., object], ...] = (
    matmul,
    dense,
    readout,
    lora,
    conv,
    avg_pool,
    max_pool,
    embed,
    norm,
    elementwise,
    glu,
    softmax,
    dropout,
    add,
    weighted_add,
    residual,
    residual_taus,
    gated_update,
    gated_sum,
    recurrent_kernel,
    dot_product_attention,
    router,
    grouped_dense,
    mixture,
    softmax_cross_entropy,
    mse_loss,
    umup_learning_rate,
)


class RuleRow(NamedTuple):
    """One row of the table of rules.

    Attributes:
        name: Name of the rule in `unitscale.rules`.
        formula: Its formula and assumptions, in words.
        source: Papers and places in them.

    Example:
        >>> RuleRow("sum", "Forward `n^-1/2`.", "Unit Scaling, arXiv 2303.11257").name
        'sum'
    """

    name: str
    formula: str
    source: str


def table() -> tuple[RuleRow, ...]:
    """Return name, formula and source of every rule.

    Returns:
        One row per rule: products, element-wise functions, sums, attention, losses, learning rates.

    Example:
        >>> [row.formula for row in table() if row.name == "mse_loss"][0][:10]
        'Forward 1.'
    """
    return tuple(
        RuleRow(rule.__name__, _section(rule, "Scaling"), _section(rule, "References"))
        for rule in _RULES
    )


def table_page() -> str:
    """Return `table` as a page of Markdown.

    Returns:
        A heading, then formula and source of each rule under its name.

    Example:
        >>> print(table_page().splitlines()[0])
        # Rules of unit scaling
    """
    head = """# Rules of unit scaling

Made by `python -m unitscale.rules` from the docstrings of `unitscale.rules`. *Forward* is the
factor on the output, the others are those on the operands' gradients, before a constraint makes
those that are no cut edges equal.
"""
    rows = (
        f"\n## `{row.name}`\n\n{_filled(row.formula)}\n\n{_filled(f'*Source:* {row.source}')}\n"
        for row in table()
    )
    return head + "".join(rows)


def _filled(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _section(rule: Callable[..., object], title: str) -> str:
    text = inspect.getdoc(rule) or ""
    found = re.search(rf"^{title}:\n((?:    .*\n?|\n)+)", text, flags=re.MULTILINE)
    return " ".join(found.group(1).split()) if found else ""
