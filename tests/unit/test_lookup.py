"""What came next before."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.lookup import LONGEST, SHORTEST, lookup


def find(text, num_tokens):
    return lookup(np.array(text, dtype=np.int32), num_tokens)


def test_what_came_behind_the_same_tokens():
    assert find([1, 2, 3, 4, 9, 1, 2], 2) == [3, 4]


def test_one_token_is_no_match():
    assert find([1, 2, 3, 9, 2], 2) == []
    assert find([], 3) == find([1], 3) == find([1, 1], 3) == []


def test_the_longest_match_wins_over_a_later_one():
    assert find([5, 1, 2, 7, 8, 1, 2, 3, 5, 1, 2], 1) == [7]


def test_the_latest_of_equal_matches_wins():
    assert find([1, 2, 7, 9, 1, 2, 8, 9, 9, 1, 2], 1) == [8]


def test_a_text_in_a_circle_goes_on_in_it():
    assert find([7, 3, 4, 3, 4], 5) == [3, 4, 3, 4, 3]
    assert find([1, 1, 1], 3) == [1, 1, 1]


def reference(text, num_tokens):
    """Written out: every earlier place, by how much of what stands before it is the text's end."""
    best, start = SHORTEST - 1, None
    for end in range(1, len(text)):
        size = 0
        while size < min(end, LONGEST) and text[end - 1 - size] == text[len(text) - 1 - size]:
            size += 1
        if size >= max(best, SHORTEST):
            best, start = size, end
    if start is None:
        return []
    behind = text[start:]
    return [behind[i % len(behind)] for i in range(num_tokens)]


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 8))
def test_as_a_plain_search(text, num_tokens):
    assert find(text, num_tokens) == reference(text, num_tokens)
