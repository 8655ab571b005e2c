"""Optimizer wrappers for unit-scaled models, over any optax transformation."""

from ._umup import umup as umup
