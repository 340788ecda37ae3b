"""The command ``vllm-medusa``: ``main`` finds the sub-command, each of which is a module here."""
