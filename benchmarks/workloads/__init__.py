"""What contestants compete in: an operator on one shape, a training step, a request."""
