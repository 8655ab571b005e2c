"""Scaling rules: functions that compute static factors from shapes, in pure Python.

Every scaling formula of the library stands here, with its assumptions and source. Ops, layers,
transforms and optimizers call these functions and contain no `** -0.5` of their own. A rule returns
`Factors`: a forward factor, and one backward factor per operand. "Unit" means an RMS of 1.

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

# For users.
from ._attention import (
    AttentionContext as AttentionContext,
    NormPlacement as NormPlacement,
    dot_product_attention as dot_product_attention,
)
from ._elementwise import (
    avg_pool as avg_pool,
    dropout as dropout,
    elementwise as elementwise,
    glu as glu,
    max_pool as max_pool,
)
from ._linear import (
    Constraint as Constraint,
    Factors as Factors,
    constrain as constrain,
    conv as conv,
    dense as dense,
    embed as embed,
    grouped_dense as grouped_dense,
    lora as lora,
    matmul as matmul,
    norm as norm,
    readout as readout,
    recurrent_kernel as recurrent_kernel,
)
from ._residual import (
    ResidualScheme as ResidualScheme,
    add as add,
    gated_sum as gated_sum,
    gated_update as gated_update,
    normalized_weights as normalized_weights,
    residual as residual,
    residual_taus as residual_taus,
    umup_learning_rate as umup_learning_rate,
    weighted_add as weighted_add,
)
from ._softmax import (
    mixture as mixture,
    mse_loss as mse_loss,
    router as router,
    softmax as softmax,
    softmax_cross_entropy as softmax_cross_entropy,
)

# isort: split
# For the other packages of the library.
from ._attention import logit_factor as logit_factor
from ._residual import (
    RESIDUAL_SCHEMES as RESIDUAL_SCHEMES,
    ROLES as ROLES,
    ResidualFactors as ResidualFactors,
)
from ._simulate import (
    Simulation as Simulation,
    closed_form as closed_form,
    simulate as simulate,
)
