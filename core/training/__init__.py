"""Training of draft heads and models: datasets, losses, the trainer, checkpoints."""
