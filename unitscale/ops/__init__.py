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
- ``constraint`` selects the factor that output and gradients share (`rules.constrain`). None gives
  each its own ideal factor, which is correct only on cut edges.
- ``config`` gives the formats of a quantized matmul (`quant.MatmulConfig`); None multiplies in the
  promoted dtype. ``state`` holds the scales of a strategy with state, such as `quant.Delayed`.

Ops support reverse-mode differentiation only; forward mode raises an error.
"""

from ._linear import (  # Matmuls, convolutions and embeddings
    dense as dense,
    readout as readout,
    matmul as matmul,
    einsum as einsum,
    lora as lora,
)
from ._conv import conv as conv, conv_transpose as conv_transpose
from ._embed import embed as embed, tied_embed as tied_embed
from ._elementwise import (  # Activations, dropout and pooling
    relu as relu,
    gelu as gelu,
    silu as silu,
    tanh as tanh,
    sigmoid as sigmoid,
    gelu_glu as gelu_glu,
    silu_glu as silu_glu,
    sigmoid_glu as sigmoid_glu,
    softmax as softmax,
    dropout as dropout,
)
from ._conv import avg_pool as avg_pool, max_pool as max_pool
from ._norm import (  # Norms
    layer_norm as layer_norm,
    rms_norm as rms_norm,
    group_norm as group_norm,
    batch_norm as batch_norm,
    batch_statistics as batch_statistics,
)
from ._attention import dot_product_attention as dot_product_attention  # Attention
from ._embed import rotary as rotary
from ._attention_path import (
    attention_path as attention_path,
    attention_paths as attention_paths,
    AttentionPath as AttentionPath,
    Implementation as Implementation,
)
from ._residual import (  # Sums and residual branches
    add as add,
    weighted_add as weighted_add,
    fan_out as fan_out,
    residual as residual,
    residual_split as residual_split,
    residual_add as residual_add,
)
from ._loss import softmax_cross_entropy as softmax_cross_entropy, mse_loss as mse_loss  # Losses
from ._readout_cross_entropy import readout_cross_entropy as readout_cross_entropy
from ._moe import (  # Mixture of experts
    route as route,
    mixture as mixture,
    grouped_dense as grouped_dense,
    attach_loss as attach_loss,
    Routing as Routing,
    Groups as Groups,
)
from ._recurrent import (  # Recurrent cells
    simple_rnn as simple_rnn,
    gru as gru,
    lstm as lstm,
    highway as highway,
    gated_sum as gated_sum,
    gated_update as gated_update,
)
from ._operands import (  # Ops of your own
    unit_scaled as unit_scaled,
    UnitScaled as UnitScaled,
    scale as scale,
    scale_fwd as scale_fwd,
    scale_bwd as scale_bwd,
    ArrayLike as ArrayLike,
)
from ._elementwise import elementwise as elementwise
