"""Scaling rules: functions that compute static factors from shapes, in pure Python.

Every scaling formula of the library is defined here, with its assumptions and source. Ops, layers,
transforms and optimizers call these functions. A rule returns `Factors`: a forward factor, and one
backward factor per operand. "Unit" means an RMS of 1.

Arguments mean the same in every rule. `in_features` is the contracted dimension, `out_features`
the last dimension of the output; `batch`, `rows` and `tokens` are products of all leading
dimensions; `mult` multiplies a function's argument (for softmax, the inverse temperature);
`constraint` makes the factors of non-cut edges equal (see `constrain`). Rules raise TypeError if a
size or number is not static, and ValueError if it is out of range or does not fit the others.

Papers: *Unit Scaling* is Blake, Orr, Luschi, "Unit Scaling: Out-of-the-Box Low-Precision Training",
ICML 2023, arXiv 2303.11257; *u-muP* is Blake et al., "u-muP: The Unit-Scaled Maximal Update
Parametrization", 2024, arXiv 2407.17465.

>>> from unitscale import rules
>>> rules.dense(16, 64, batch=4)
Factors(fwd=0.25, bwd=(0.25, 0.5, 0.5))
"""

from ._linear import Factors as Factors, Constraint as Constraint, constrain as constrain  # Factors
from ._linear import (  # Matmuls, embeddings and norms
    dense as dense,
    readout as readout,
    matmul as matmul,
    embed as embed,
    conv as conv,
    lora as lora,
    grouped_dense as grouped_dense,
    recurrent_kernel as recurrent_kernel,
    norm as norm,
)
from ._elementwise import (  # Activations, pooling and experts
    elementwise as elementwise,
    glu as glu,
    dropout as dropout,
    avg_pool as avg_pool,
    max_pool as max_pool,
)
from ._softmax import softmax as softmax, router as router, mixture as mixture
from ._softmax import softmax_cross_entropy as softmax_cross_entropy, mse_loss as mse_loss  # Losses
from ._attention import (  # Attention
    dot_product_attention as dot_product_attention,
    AttentionContext as AttentionContext,
    NormPlacement as NormPlacement,
)
from ._residual import (  # Sums and residual branches
    add as add,
    weighted_add as weighted_add,
    normalized_weights as normalized_weights,
    residual as residual,
    residual_taus as residual_taus,
    ResidualScheme as ResidualScheme,
    gated_sum as gated_sum,
    gated_update as gated_update,
)
from ._residual import umup_learning_rate as umup_learning_rate  # Learning rates

# For the other packages of the library.
from ._attention import logit_factor as logit_factor
from ._residual import ROLES as ROLES, ResidualFactors as ResidualFactors
from ._simulate import (
    Simulation as Simulation,
    closed_form as closed_form,
    simulate as simulate,
    traced as traced,
)
