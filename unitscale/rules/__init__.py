"""Scaling rules: from shapes to static factors, in pure Python.

Unit scaling is a set of small formulas, and its bugs are small formulas retyped with slightly
different constants. Here each is written once, with its assumption and source, apart from any array
code: ops, layers, transforms and optimizers call these and contain no `** -0.5` of their own. Every
rule returns `Factors`, the forward factor and one backward factor per operand.

>>> from unitscale import rules
>>> rules.dense(16, 64, batch=4)
Factors(fwd=0.25, bwd=(0.25, 0.5, 0.5))
"""

from ._add import add as add, normalized_weights as normalized_weights, weighted_add as weighted_add
from ._attention import dot_product_attention as dot_product_attention, logit_factor as logit_factor
from ._attention_context import (
    AttentionContext as AttentionContext,
    NormPlacement as NormPlacement,
)
from ._closed_form import closed_form as closed_form
from ._constraints import (
    CONSTRAINTS as CONSTRAINTS,
    Constraint as Constraint,
    constrain as constrain,
)
from ._dropout import dropout as dropout
from ._elementwise import elementwise as elementwise, glu as glu
from ._embed import embed as embed
from ._factors import Factors as Factors
from ._learning_rate import ROLES as ROLES, umup_learning_rate as umup_learning_rate
from ._linear import conv as conv, dense as dense, matmul as matmul, readout as readout
from ._lora import lora as lora
from ._loss import mse_loss as mse_loss, softmax_cross_entropy as softmax_cross_entropy
from ._moe import grouped_dense as grouped_dense, mixture as mixture, router as router
from ._norm import norm as norm
from ._pool import avg_pool as avg_pool, max_pool as max_pool
from ._recurrent import (
    gated_sum as gated_sum,
    gated_update as gated_update,
    recurrent_kernel as recurrent_kernel,
)
from ._residual import (
    RESIDUAL_SCHEMES as RESIDUAL_SCHEMES,
    ResidualFactors as ResidualFactors,
    ResidualScheme as ResidualScheme,
    residual as residual,
    residual_taus as residual_taus,
)
from ._simulate import (
    Simulation as Simulation,
    is_floating as is_floating,
    simulate as simulate,
)
from ._softmax import softmax as softmax
from ._table import RuleRow as RuleRow, table as table, table_page as table_page
