"""Fine-tuning on question answering and sentence classification."""
