"""Fine-tuning on a task: what is read, what the model sees, and how its answers are scored."""
