"""Which tree pays on this machine: accuracy of the heads, cost of a step, and the choice."""
