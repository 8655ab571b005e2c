"""Training on several devices, with gradients and weights exchanged in FP8."""

from ._auto_scale import AutoScale as AutoScale
from ._collectives import (
    AxisName as AxisName,
    all_gather as all_gather,
    all_reduce as all_reduce,
    reduce_scatter as reduce_scatter,
)
from ._mesh import (
    ROW_LAYERS as ROW_LAYERS,
    batch_axes as batch_axes,
    batch_share as batch_share,
    make_mesh as make_mesh,
    param_shardings as param_shardings,
    shard_batch as shard_batch,
)
from ._multihost import initialize as initialize
from ._train_step import ParallelState as ParallelState, train_step as train_step
