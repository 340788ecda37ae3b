"""The benchmark: variants of an engine side by side, prompt by prompt, in one run."""
