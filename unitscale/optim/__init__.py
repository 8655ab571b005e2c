"""Optimizer wrappers for unit-scaled models, around any optax transformation."""

from ._umup import (  # Learning rates
    umup as umup,
    umup_rates as umup_rates,
    UmupRates as UmupRates,
    UmupRate as UmupRate,
    independent_weight_decay as independent_weight_decay,
    muon_axes as muon_axes,
)
from ._scaled import (  # State in 16 and 8 bits
    scaled as scaled,
    ScaledTransformation as ScaledTransformation,
    ScaledState as ScaledState,
    convert_state as convert_state,
    apply_updates as apply_updates,
)
from ._storage import Moment as Moment, SquareRoot as SquareRoot
from ._roles import Moments as Moments, Role as Role
from ._scaled import (  # Gradients and averages
    clip_by_global_norm as clip_by_global_norm,
    global_norm as global_norm,
    skip_nonfinite as skip_nonfinite,
    SkipState as SkipState,
    ema as ema,
    incremental_update as incremental_update,
)
