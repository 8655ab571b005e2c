"""An MLP and a CNN in plain flax.nnx, trained on images under `unitscale.transforms.scalify`."""
