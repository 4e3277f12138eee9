"""Existing recommenders on these operators, and models for where fastcross is not installed."""
