"""Train neural networks in 16-bit and 8-bit floating point without loss scaling, in JAX.

The packages, lowest layer first. Import them by name, for example ``from unitscale import nn``:

- `unitscale.core`: `ScaledArray`, number formats, exact powers of two, saturating casts.
- `unitscale.rules`: the formulas of the static scaling factors, with their sources.
- `unitscale.quant`: quantized matmuls.
- `unitscale.ops`: unit-scaled operations on arrays, for any layer library.
- `unitscale.nn`: layers for Flax NNX.
- `unitscale.transforms`: `scalify`, which adds scales to every array of a JAX program.
- `unitscale.optim`: 16-bit and 8-bit weights and moments for optax, u-muP learning rates.
- `unitscale.parallel`: exchange of gradients and weights between devices in FP8.
- `unitscale.analysis`: cut edges, gradient checks, statistics of every value, fitted factors.

`python -m unitscale.doctor` checks the versions, devices and FP8 matmuls of your machine.

Example:
    >>> import jax.numpy as jnp
    >>> from unitscale import as_scaled
    >>> x = as_scaled(jnp.full((4,), 1000.0), dtype=jnp.float8_e4m3fn)
    >>> float(x.scale), x.dtype.name
    (1024.0, 'float8_e4m3fn')
"""

from .core import (  # Scaled arrays
    ScaledArray as ScaledArray,
    as_scaled as as_scaled,
    to_array as to_array,
    map_values as map_values,
    cast as cast,
    rescale as rescale,
    rebalance as rebalance,
)
from .core import grad as grad, value_and_grad as value_and_grad  # Differentiation
from .core import batch_size as batch_size, batch_over as batch_over  # Batch size
from .transforms import scalify as scalify  # Scale propagation

__version__ = "0.1.0"
