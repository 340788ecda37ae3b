"""Adapters to vLLM's model runners; everything else is shared."""
