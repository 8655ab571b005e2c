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

from ._amax import (
    AmaxState as AmaxState,
    DotGeneral as DotGeneral,
    EinsumOp as EinsumOp,
    Overflow as Overflow,
    OverflowMonitor as OverflowMonitor,
    advance as advance,
    amax_state as amax_state,
    amax_states as amax_states,
)
from ._attention import KVCache as KVCache, MultiHeadAttention as MultiHeadAttention
from ._convert import (
    ConfigLike as ConfigLike,
    Conversion as Conversion,
    ConversionReport as ConversionReport,
    StaticWeight as StaticWeight,
    convert as convert,
    restore as restore,
)
from ._embed import (
    Embed as Embed,
    PositionalEmbed as PositionalEmbed,
    TiedReadout as TiedReadout,
)
from ._gradients import (
    Optimizer as Optimizer,
    calibrate as calibrate,
    grad as grad,
    value_and_grad as value_and_grad,
)
from ._linear import (
    Conv as Conv,
    ConvTranspose as ConvTranspose,
    Dense as Dense,
    Einsum as Einsum,
    Linear as Linear,
    LoRA as LoRA,
    LoRALinear as LoRALinear,
    Readout as Readout,
)
from ._mlp import MLP as MLP, ExpertDense as ExpertDense, MoE as MoE
from ._norm import (
    BatchNorm as BatchNorm,
    Dropout as Dropout,
    GroupNorm as GroupNorm,
    LayerNorm as LayerNorm,
    RMSNorm as RMSNorm,
)
from ._params import unpadded as unpadded
from ._policy import (
    POLICIES as POLICIES,
    Policy as Policy,
    as_policy as as_policy,
    set_policies as set_policies,
)
from ._recurrent import (
    RNN as RNN,
    GRUCell as GRUCell,
    OptimizedLSTMCell as OptimizedLSTMCell,
    RHNCell as RHNCell,
    RNNCell as RNNCell,
    SimpleCell as SimpleCell,
)
from ._serve import to_static as to_static
from ._transformer import (
    Residual as Residual,
    TransformerLayer as TransformerLayer,
    TransformerStack as TransformerStack,
    stack_layers as stack_layers,
    unstack_layers as unstack_layers,
)
from ._unit_scale import (
    Rescaled as Rescaled,
    UnitScaleReport as UnitScaleReport,
    unit_scale as unit_scale,
)
