"""What the states of optax hold: which of their arrays may be stored in few bits, and as what."""

from typing import Any, Literal, TypeAlias

Role: TypeAlias = Literal["first", "second", "trace"]
"""What an array of state is: a mean of gradients that is divided by the root of another, a mean of
squares whose root divides, or a momentum that is the step itself. See `scaled`."""

# By the type of the state, as a field's name says nothing: `nu` of Adam is a mean of squares, that
# of SM3 a momentum. What is not here keeps its width, because less would lose what it is for:
# sums that only grow (Adagrad, MADGRAD, COCOB, DoG, the `grad_sum` of Prodigy and D-Adaptation),
# averages and copies of parameters, gradients that a difference is taken of (Adan's `g`, L-BFGS),
# means whose square is subtracted from a mean of squares (centred RMSprop, AdaBelief), means too
# slow for any rounding to follow (`m2` of AdEMAMix), factors that multiply up (Rprop).
_HELD: dict[str, dict[str, Role]] = {
    "FactoredState": {"v": "second"},
    "ScaleByAdaDeltaState": {"e_g": "second", "e_x": "second"},
    "ScaleByAdamState": {"mu": "first", "nu": "second"},
    "ScaleByAdanState": {"m": "trace", "v": "trace", "n": "second"},
    "ScaleByAdemamixState": {"m1": "first", "nu": "second"},
    "ScaleByAmsgradState": {"mu": "first", "nu": "second", "nu_max": "second"},
    "ScaleByBeliefState": {"nu": "second"},
    "ScaleByLionState": {"mu": "trace"},
    "ScaleByNovogradState": {"mu": "trace"},
    "ScaleByRmsState": {"nu": "second"},
    "ScaleByRmsWithCountState": {"nu": "second"},
    "ScaleBySM3State": {"nu": "trace"},
    "ScaleBySimplifiedAdEMAMixState": {"m": "trace", "n": "second"},
    "TraceState": {"trace": "trace"},
    "DAdaptAdamWState": {"exp_avg": "first", "exp_avg_sq": "second"},
    "MomoAdamState": {"exp_avg": "trace", "exp_avg_sq": "second"},
    "MomoState": {"exp_avg": "trace"},
    "MuonState": {"mu": "trace"},
    "ProdigyState": {"exp_avg": "first", "exp_avg_sq": "second"},
    "SophiaState": {"mu": "trace", "nu": "trace"},
}

# They measure how far the weights have come, in steps that begin near 1e-6 of them.
_FROM_TINY_STEPS = (
    "DAdaptAdamWState",
    "DoGState",
    "DoWGState",
    "MechanicState",
    "ProdigyState",
    "ScaleByDistanceOverGradientsState",
)


def _name(x: Any) -> str:
    """The type of a state of optax; "" for anything else."""
    return type(x).__name__ if type(x).__module__.partition(".")[0] == "optax" else ""


def held_by(x: Any) -> dict[str, Role] | None:
    """The roles of the fields of a state, or None for what is no state of the table."""
    return _HELD.get(_name(x))


def starts_tiny(x: Any) -> bool:
    """Whether ``x`` is the state of a transformation whose first steps are lost in rounding."""
    return _name(x) in _FROM_TINY_STEPS
