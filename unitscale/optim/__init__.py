"""Optimizer wrappers for unit-scaled models, over any optax transformation."""

from ._roles import Moments as Moments, Role as Role
from ._scaled import (
    ScaledState as ScaledState,
    ScaledTransformation as ScaledTransformation,
    SkipState as SkipState,
    apply_updates as apply_updates,
    clip_by_global_norm as clip_by_global_norm,
    convert_state as convert_state,
    ema as ema,
    global_norm as global_norm,
    incremental_update as incremental_update,
    scaled as scaled,
    skip_nonfinite as skip_nonfinite,
)
from ._storage import Moment as Moment, SquareRoot as SquareRoot
from ._umup import (
    UmupRate as UmupRate,
    UmupRates as UmupRates,
    independent_weight_decay as independent_weight_decay,
    muon_axes as muon_axes,
    umup as umup,
    umup_rates as umup_rates,
)
