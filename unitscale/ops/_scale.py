"""The primitives of unit scaling, as ops: static factors forward and backward."""

from ..core import scale as scale, scale_bwd as scale_bwd, scale_fwd as scale_fwd
