"""From prompts to heads: answers of the target, its hidden states, training, evaluation."""
