"""Unit-scaled layers for Flax NNX.

Layers have the names and argument order of `flax.nnx`. They accept arrays and ScaledArrays, and
return a ScaledArray. Functions without parameters (activations, pooling, sums, losses) are in
`unitscale.ops`, under the names of `flax.nnx` and `optax`.

Arguments that layers share:

- ``policy``: the number formats, a `Policy` or the name of a preset (`as_policy`).
- ``dtype``, ``param_dtype``: override the policy's compute dtype and parameter dtype, as in
  `flax.nnx`; None keeps them.
- ``kernel_init``, ``bias_init``, ...: initializers; by default N(0, 1) for kernels and tables, and
  zeros for biases. Factors assume unit variance: another variance changes the size of activations.
- ``rngs``: streams of random keys; parameters draw from "params".
- ``kernel_metadata``, ``bias_metadata``, ...: metadata of the parameters' variables, such as
  ``{"out_sharding": (None, "model")}``. Every parameter also has ``role``, ``fan_in``,
  ``fan_out`` and ``depth`` (the number of residual branches of its stack), for u-muP.
- ``out_sharding`` (argument of the call): sharding of the output; None leaves it to JAX.

Constructors raise ValueError for unknown policies or options and for incompatible sizes; calls
raise it for shapes that do not fit the layer.
"""

from ._linear import (  # Layers
    Dense as Dense,
    Linear as Linear,
    Readout as Readout,
    Einsum as Einsum,
    Conv as Conv,
    ConvTranspose as ConvTranspose,
    LoRA as LoRA,
    LoRALinear as LoRALinear,
)
from ._embed import Embed as Embed, TiedReadout as TiedReadout, PositionalEmbed as PositionalEmbed
from ._norm import (
    LayerNorm as LayerNorm,
    RMSNorm as RMSNorm,
    GroupNorm as GroupNorm,
    BatchNorm as BatchNorm,
    Dropout as Dropout,
)
from ._mlp import MLP as MLP, MoE as MoE, ExpertDense as ExpertDense  # Transformers
from ._attention import MultiHeadAttention as MultiHeadAttention, KVCache as KVCache
from ._transformer import (
    TransformerLayer as TransformerLayer,
    TransformerStack as TransformerStack,
    Residual as Residual,
    stack_layers as stack_layers,
    unstack_layers as unstack_layers,
)
from ._recurrent import (  # Recurrent networks
    RNN as RNN,
    SimpleCell as SimpleCell,
    GRUCell as GRUCell,
    OptimizedLSTMCell as OptimizedLSTMCell,
    RHNCell as RHNCell,
    RNNCell as RNNCell,
)
from ._policy import (  # Policies
    Policy as Policy,
    POLICIES as POLICIES,
    as_policy as as_policy,
    set_policies as set_policies,
)
from ._gradients import value_and_grad as value_and_grad, grad as grad  # Training
from ._gradients import Optimizer as Optimizer
from ._scalify import scalify as scalify
from ._params import unpadded as unpadded
from ._amax import (  # FP8 scales
    advance as advance,
    amax_state as amax_state,
    amax_states as amax_states,
    AmaxState as AmaxState,
    OverflowMonitor as OverflowMonitor,
    Overflow as Overflow,
)
from ._gradients import calibrate as calibrate
from ._convert import (  # Converting Flax models
    convert as convert,
    restore as restore,
    ConversionReport as ConversionReport,
    Conversion as Conversion,
    ConfigLike as ConfigLike,
)
from ._amax import DotGeneral as DotGeneral, EinsumOp as EinsumOp
from ._unit_scale import (
    unit_scale as unit_scale,
    UnitScaleReport as UnitScaleReport,
    Rescaled as Rescaled,
)
from ._serve import to_static as to_static  # Serving
from ._convert import StaticWeight as StaticWeight
