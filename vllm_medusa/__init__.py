"""Medusa heads with tree verification for stock vLLM.

This module holds the version only: vLLM imports the package in every one of its
processes to find the plugin, so importing it must cost nothing.
"""

__version__ = "0.1.0"
