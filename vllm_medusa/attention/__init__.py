"""Attention in which each row sees its context, its ancestors in a token tree and itself."""
