"""The Deep & Cross Network and the models the paper compares it with."""
