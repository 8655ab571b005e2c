"""The GPT recipe: a unitscale model and its plain twin, built from the same config."""
