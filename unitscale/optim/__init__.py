"""Optimizer wrappers for unit-scaled models, over any optax transformation."""

from . import _export as _export
from ._convert import convert_state as convert_state
from ._decay import independent_weight_decay as independent_weight_decay
from ._moments import Moment as Moment
from ._nonfinite import SkipState as SkipState, skip_nonfinite as skip_nonfinite
from ._roles import Moments as Moments
from ._scaled import (
    ScaledState as ScaledState,
    ScaledTransformation as ScaledTransformation,
    scaled as scaled,
)
from ._square_root import SquareRoot as SquareRoot
from ._states import Role as Role
from ._umup import umup as umup
from ._umup_rates import UmupRate as UmupRate, UmupRates as UmupRates, umup_rates as umup_rates
from ._values import (
    clip_by_global_norm as clip_by_global_norm,
    ema as ema,
    global_norm as global_norm,
    incremental_update as incremental_update,
)
from ._weights import apply_updates as apply_updates
