"""Unit-scaled layers for Flax NNX.

Modules have the names and argument order of `flax.nnx`. Their parameters are drawn from N(0, 1)
and carry ``role``, ``fan_in``, ``fan_out`` and ``depth`` as variable metadata; their formats come
from a `Policy`. Every layer takes arrays or ScaledArrays and returns a ScaledArray.

What has no parameters is a function of `unitscale.ops`: activations, pooling, sums and losses,
under the names of `flax.nnx` and `optax`.
"""

from . import _export as _export, _serialization as _serialization
from ._amax_state import (
    AmaxState as AmaxState,
    DotGeneral as DotGeneral,
    EinsumOp as EinsumOp,
    advance as advance,
    amax_state as amax_state,
    amax_states as amax_states,
    read_state as read_state,
)
from ._attention import KVCache as KVCache, MultiHeadAttention as MultiHeadAttention
from ._calibrate import calibrate as calibrate
from ._conv import Conv as Conv, ConvTranspose as ConvTranspose
from ._conversion import Conversion as Conversion, ConversionReport as ConversionReport
from ._conversion_rules import CONVERSIONS as CONVERSIONS, ConfigLike as ConfigLike
from ._convert import convert as convert, restore as restore
from ._dropout import Dropout as Dropout
from ._einsum import Einsum as Einsum
from ._embed import (
    Embed as Embed,
    PositionalEmbed as PositionalEmbed,
    TiedReadout as TiedReadout,
)
from ._gradients import grad as grad, value_and_grad as value_and_grad
from ._hooks import StaticWeight as StaticWeight
from ._layer_scan import stack_layers as stack_layers, unstack_layers as unstack_layers
from ._linear import Dense as Dense, Linear as Linear, Readout as Readout
from ._lora import LoRA as LoRA, LoRALinear as LoRALinear
from ._mlp import MLP as MLP
from ._moe import ExpertDense as ExpertDense, MoE as MoE
from ._monitor import Overflow as Overflow, OverflowMonitor as OverflowMonitor
from ._norm import (
    BatchNorm as BatchNorm,
    GroupNorm as GroupNorm,
    LayerNorm as LayerNorm,
    RMSNorm as RMSNorm,
)
from ._optimizer import Optimizer as Optimizer
from ._param import unpadded as unpadded
from ._policy import (
    POLICIES as POLICIES,
    Policy as Policy,
    as_policy as as_policy,
)
from ._recurrent import (
    GRUCell as GRUCell,
    OptimizedLSTMCell as OptimizedLSTMCell,
    RHNCell as RHNCell,
    RNNCell as RNNCell,
    SimpleCell as SimpleCell,
)
from ._residual import Residual as Residual
from ._rnn import RNN as RNN
from ._serve import to_static as to_static
from ._set_policies import set_policies as set_policies
from ._transformer import TransformerLayer as TransformerLayer, TransformerStack as TransformerStack
from ._unit_scale import (
    Rescaled as Rescaled,
    UnitScaleReport as UnitScaleReport,
    unit_scale as unit_scale,
)
