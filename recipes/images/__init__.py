"""Classifiers of images: an MLP and a CNN in plain flax.nnx, and a ViT in `unitscale.nn`."""
