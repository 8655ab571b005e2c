"""Character language models: the study of regular and unit-scaled models in low precision."""
