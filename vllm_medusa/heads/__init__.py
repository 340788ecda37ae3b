"""Medusa heads: their checkpoint formats, and the module that runs them."""
