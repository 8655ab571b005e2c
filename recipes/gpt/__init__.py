"""The GPT recipe: a unitscale model and its plain twin, built from the same config."""

from .task import GPT as GPT, build as build
