"""Drafting without heads: where a request's text repeats itself, what came behind it before.

Summaries, edits, code and small models' texts repeat themselves; the tokens that followed the last
ones before are then a better guess than any head's, and cost nothing (prompt lookup decoding, A.
Saxena, 2023; vLLM's "ngram" method is of the same kind). They form a chain.
"""

import numpy as np
from numpy.typing import NDArray

# The last so many tokens must have occurred before. One alone says little.
SHORTEST = 2
# A longer match than this is no better sign.
LONGEST = 5


def lookup(tokens: NDArray[np.int32], num_tokens: int) -> list[int]:
    """What followed the last tokens of a text when they stood in it before.

    The longest match counts, up to ``LONGEST`` tokens, and the latest of several. Where it lies so
    close to the end that less than ``num_tokens`` came behind it, the text is taken to go round in
    a circle.

    Args:
        tokens: [n], the text so far.
        num_tokens: how many tokens are wanted.

    Returns:
        ``num_tokens`` tokens, or none where the text does not repeat itself.
    """
    length = len(tokens)
    if length <= SHORTEST:
        return []
    # Places behind a match: where the tokens before are the last tokens of the text.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
    for size in range(2, LONGEST + 1):
        longer = ends[ends >= size]
        longer = longer[tokens[longer - size] == tokens[length - size]]
        if len(longer):
            ends = longer
        elif size <= SHORTEST:
            return []
        else:
            break
    start = int(ends[-1])
    return tokens[start + np.arange(num_tokens) % (length - start)].tolist()
