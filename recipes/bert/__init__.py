"""The BERT recipe: masked language modelling with `unitscale.nn`."""
