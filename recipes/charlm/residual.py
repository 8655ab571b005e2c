"""Weights of residual branches, the same in both libraries."""

from unitscale import rules

from .config import CharlmModelConfig


def branch_taus(config: CharlmModelConfig) -> list[float]:
    """The tau of every residual branch: one that mixes characters and an MLP in each layer."""
    mixing = config.attention_ratio if config.kind == "attention" else 1.0
    own = rules.residual_taus(config.residual, 2 * config.layers, tau=config.tau)
    return [tau if index % 2 else tau * mixing for index, tau in enumerate(own)]
