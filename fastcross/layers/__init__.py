"""Modules: parameters and initialisation only."""
