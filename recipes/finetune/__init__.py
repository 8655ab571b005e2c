"""Fine-tuning for question answering and sentence classification."""
