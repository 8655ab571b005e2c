"""Unit-scaled ops: functions of arrays and ScaledArrays, independent of any layer library.

Each op multiplies its output by a static forward factor and its gradients by static backward
factors, so that inputs of RMS 1 give outputs and gradients of RMS 1 ("unit"). The *Scaling* section
of an op names the rule in `unitscale.rules` that computes the factors, and says what happens to the
scales of ScaledArray operands.

Unless a docstring says otherwise:

- Operands (`ArrayLike`) are floating arrays or ScaledArrays. Anything else raises TypeError. Shapes
  and options that do not fit raise ValueError.
- The result is a ScaledArray in the promoted dtype of the operands, where 8-bit data counts as
  bfloat16. Functions other than matmuls are computed in float32 and rounded once.
- ``constraint`` chooses how the output and the gradients share one factor (`rules.constrain`). None
  gives each its own ideal factor, which is correct only on cut edges.
- ``config`` gives the formats of a quantized matmul (`quant.MatmulConfig`), and ``state`` the
  scales of a strategy that keeps them between steps, such as `quant.Delayed`.

Ops support reverse-mode differentiation only; forward mode raises an error.
"""

from ._attention import dot_product_attention as dot_product_attention
from ._attention_path import (
    AttentionPath as AttentionPath,
    Implementation as Implementation,
    attention_path as attention_path,
    attention_paths as attention_paths,
)
from ._conv import (
    avg_pool as avg_pool,
    conv as conv,
    conv_transpose as conv_transpose,
    max_pool as max_pool,
)
from ._elementwise import (
    dropout as dropout,
    elementwise as elementwise,
    gelu as gelu,
    gelu_glu as gelu_glu,
    relu as relu,
    sigmoid as sigmoid,
    sigmoid_glu as sigmoid_glu,
    silu as silu,
    silu_glu as silu_glu,
    softmax as softmax,
    tanh as tanh,
)
from ._embed import embed as embed, rotary as rotary, tied_embed as tied_embed
from ._linear import (
    dense as dense,
    einsum as einsum,
    lora as lora,
    matmul as matmul,
    readout as readout,
)
from ._loss import mse_loss as mse_loss, softmax_cross_entropy as softmax_cross_entropy
from ._moe import (
    Groups as Groups,
    Routing as Routing,
    attach_loss as attach_loss,
    grouped_dense as grouped_dense,
    mixture as mixture,
    route as route,
)
from ._norm import (
    batch_norm as batch_norm,
    batch_statistics as batch_statistics,
    group_norm as group_norm,
    layer_norm as layer_norm,
    rms_norm as rms_norm,
)
from ._operands import (
    ArrayLike as ArrayLike,
    UnitScaled as UnitScaled,
    scale as scale,
    scale_bwd as scale_bwd,
    scale_fwd as scale_fwd,
    unit_scaled as unit_scaled,
)
from ._readout_cross_entropy import readout_cross_entropy as readout_cross_entropy
from ._recurrent import (
    gated_sum as gated_sum,
    gated_update as gated_update,
    gru as gru,
    highway as highway,
    lstm as lstm,
    simple_rnn as simple_rnn,
)
from ._residual import (
    add as add,
    fan_out as fan_out,
    residual as residual,
    residual_add as residual_add,
    residual_split as residual_split,
    weighted_add as weighted_add,
)
