"""Training on several devices, with gradients and weights exchanged in FP8."""

from ._train_step import train_step as train_step, ParallelState as ParallelState  # Training
from ._multihost import initialize as initialize  # Devices and shardings
from ._mesh import (
    make_mesh as make_mesh,
    shard_batch as shard_batch,
    batch_share as batch_share,
    batch_axes as batch_axes,
    param_shardings as param_shardings,
    ROW_LAYERS as ROW_LAYERS,
)
from ._collectives import (  # FP8 collectives
    all_reduce as all_reduce,
    reduce_scatter as reduce_scatter,
    all_gather as all_gather,
    exchange_gradients as exchange_gradients,
    AxisName as AxisName,
)
from ._auto_scale import AutoScale as AutoScale
