"""Training: packed forward passes, the policy-gradient step, supervised warm-up, models and checkpoints."""
