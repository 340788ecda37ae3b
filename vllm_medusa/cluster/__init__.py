"""Serving on a Ray cluster: whether its nodes have what the workers will need."""
