"""Scaling rules: from shapes to static factors, in pure Python.

Unit scaling is a set of small formulas, and its bugs are small formulas retyped with slightly different
constants. Here each is written once, with its assumption and source, apart from any array code: ops, layers,
transforms and optimizers call these and contain no `** -0.5` of their own. Every rule returns `Factors`, the
forward factor and one backward factor per operand.

>>> from unitscale import rules
>>> rules.dense(16, 64, batch=4)
Factors(fwd=0.25, bwd=(0.25, 0.5, 0.5))
"""

from ._add import add as add
from ._add import normalized_weights as normalized_weights
from ._add import weighted_add as weighted_add
from ._attention import dot_product_attention as dot_product_attention
from ._attention import logit_factor as logit_factor
from ._constraints import CONSTRAINTS as CONSTRAINTS
from ._constraints import Constraint as Constraint
from ._constraints import constrain as constrain
from ._dropout import dropout as dropout
from ._elementwise import elementwise as elementwise
from ._elementwise import glu as glu
from ._embed import embed as embed
from ._factors import Factors as Factors
from ._learning_rate import umup_learning_rate as umup_learning_rate
from ._linear import conv as conv
from ._linear import dense as dense
from ._linear import matmul as matmul
from ._linear import readout as readout
from ._loss import mse_loss as mse_loss
from ._loss import softmax_cross_entropy as softmax_cross_entropy
from ._norm import norm as norm
from ._residual import RESIDUAL_SCHEMES as RESIDUAL_SCHEMES
from ._residual import ResidualFactors as ResidualFactors
from ._residual import ResidualScheme as ResidualScheme
from ._residual import residual as residual
from ._residual import residual_taus as residual_taus
from ._softmax import softmax as softmax
from ._table import RuleRow as RuleRow
from ._table import table as table
