"""Unit-scaled ops: functions of arrays and ScaledArrays, independent of any layer library.

Each op multiplies its output by a static forward factor and its gradients by static backward
factors, all taken from `unitscale.rules`, so that unit inputs give unit outputs and unit
gradients. Scales of ScaledArray operands travel beside the data: linear ops carry them, norms drop
them, other functions and the losses fold them in, sums align them.

The backward factors exist in reverse mode only; forward-mode differentiation raises an error.
"""

from ._add import add as add, weighted_add as weighted_add
from ._attention import dot_product_attention as dot_product_attention
from ._attention_path import (
    AttentionPath as AttentionPath,
    Implementation as Implementation,
    attention_path as attention_path,
    attention_paths as attention_paths,
)
from ._conv import conv as conv, conv_transpose as conv_transpose
from ._dropout import dropout as dropout
from ._einsum import einsum as einsum
from ._elementwise import (
    elementwise as elementwise,
    gelu as gelu,
    gelu_glu as gelu_glu,
    relu as relu,
    sigmoid as sigmoid,
    silu as silu,
    silu_glu as silu_glu,
    tanh as tanh,
)
from ._embed import embed as embed, tied_embed as tied_embed
from ._fan_out import fan_out as fan_out
from ._grouped import Groups as Groups, grouped_dense as grouped_dense
from ._linear import dense as dense, matmul as matmul, readout as readout
from ._lora import lora as lora
from ._loss import mse_loss as mse_loss, softmax_cross_entropy as softmax_cross_entropy
from ._moe import (
    Routing as Routing,
    attach_loss as attach_loss,
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
from ._operands import ArrayLike as ArrayLike
from ._pool import avg_pool as avg_pool, max_pool as max_pool
from ._readout_cross_entropy import readout_cross_entropy as readout_cross_entropy
from ._recurrent import (
    gated_sum as gated_sum,
    gated_update as gated_update,
    gru as gru,
    highway as highway,
    lstm as lstm,
    sigmoid_glu as sigmoid_glu,
    simple_rnn as simple_rnn,
)
from ._residual import (
    residual as residual,
    residual_add as residual_add,
    residual_split as residual_split,
)
from ._rotary import rotary as rotary
from ._scale import scale as scale, scale_bwd as scale_bwd, scale_fwd as scale_fwd
from ._softmax import softmax as softmax
from ._unit_scaled import UnitScaled as UnitScaled, unit_scaled as unit_scaled
