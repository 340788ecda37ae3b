"""The demo: a real model on two cores, served, then measured with and without Medusa."""
