"""Training: configuration, loop, evaluation, run folder."""
