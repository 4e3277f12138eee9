"""Serving: the ranker, and the server that `fastcross serve` starts."""
