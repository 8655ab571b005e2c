"""Weight decay that depends on neither the learning rate nor its schedule."""

from typing import Any

import optax


def independent_weight_decay(decay: float, mask: Any = None) -> optax.GradientTransformation:
    """Removes the same share of every weight in every step.

    Scaling:
        w <- w - decay * w, beside the update. `optax.adamw` multiplies its decay by the learning
        rate, so that width, depth and schedule change it through u-muP's learning rates; put this
        after them instead: ``optax.chain(umup(optax.adam(schedule), params),
        independent_weight_decay(1e-4))``.

    Args:
        decay: the share of a weight that a step removes, in [0, 1).
        mask: tree of booleans as the parameters, or a function from parameters to it: what decays.

    Returns:
        optax.GradientTransformation whose ``update`` needs params.

    Raises:
        ValueError: if decay is not in [0, 1).

    Example:
        >>> tx = independent_weight_decay(0.25)
        >>> updates, _ = tx.update([0.0], tx.init([8.0]), [8.0])
        >>> updates
        [-2.0]

    References:
        Blake et al., "u-muP", 2024, arXiv 2407.17465, section 3.1 (independent weight decay);
        Wortsman et al., "Small-scale proxies for large-scale Transformer training
        instabilities", 2023, arXiv 2309.14322, section 3.2.2.
    """
    if not 0 <= decay < 1:
        raise ValueError(
            "unitscale.optim.independent_weight_decay: decay must be the share of a weight that a "
            f"step removes, in [0, 1); got {decay!r}"
        )
    return optax.add_decayed_weights(-decay, mask)
