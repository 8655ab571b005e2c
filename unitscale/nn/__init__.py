"""Unit-scaled layers for Flax NNX.

Modules have the names and argument order of `flax.nnx`. Their parameters are drawn from N(0, 1)
and carry ``role``, ``fan_in``, ``fan_out`` and ``depth`` as variable metadata; their formats come
from a `Policy`. Every layer takes arrays or ScaledArrays and returns a ScaledArray.
"""

from ._attention import KVCache as KVCache, MultiHeadAttention as MultiHeadAttention
from ._conv import Conv as Conv
from ._dropout import Dropout as Dropout
from ._embed import Embed as Embed, PositionalEmbed as PositionalEmbed
from ._linear import Dense as Dense, Readout as Readout
from ._mlp import MLP as MLP
from ._norm import LayerNorm as LayerNorm, RMSNorm as RMSNorm
from ._optimizer import Optimizer as Optimizer
from ._policy import (
    PRESETS as PRESETS,
    Policy as Policy,
    as_policy as as_policy,
)
from ._recurrent import (
    GRUCell as GRUCell,
    OptimizedLSTMCell as OptimizedLSTMCell,
    RHNCell as RHNCell,
    RNNCell as RNNCell,
)
from ._residual import Residual as Residual
from ._rnn import RNN as RNN
from ._transformer import TransformerLayer as TransformerLayer, TransformerStack as TransformerStack
