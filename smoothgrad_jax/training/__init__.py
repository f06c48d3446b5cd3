"""Training: ``fit``, its engines, and checkpoints."""
