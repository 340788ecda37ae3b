"""Random sessions: requests of all kinds come, wait, are thrown out and go, and nothing is lost.

Each has the text, the ending and the logprobs that vLLM without speculation gives it (if it has a
seed: else it keeps to its rules), and in the end the engine holds nothing. ``make fuzz`` runs them
for an hour.
"""

import os
import random
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tests.integration.generation import (
    SMALL_BUSHY,
    TREES,
    assert_empty,
    fewer,
    generate,
    make_prompts,
    medusa,
    step_through,
)
from tests.integration.grammars import random_spec
from tests.integration.oracle import Oracle, oracle_drafts
from tests.integration.tiny import VOCAB, add_byte_tokenizer
from tests.integration.watch import watching
from tests.triton_interpreter import ENABLED as INTERPRETED

NUM_SESSIONS = int(os.environ.get("FUZZ_SESSIONS", "2" if INTERPRETED else "30"))
ASCII = 127  # prompts are of tokens below: broken UTF-8 at their end would show in the texts
LONGEST = 200  # tokens of a prompt and its answer

ENGINES = {
    "roomy": {"tree": SMALL_BUSHY},
    "pieces": {"tree": TREES["bushy63"], "max_num_batched_tokens": 80, "max_num_seqs": 24},
    "small cache": {"tree": SMALL_BUSHY, "num_gpu_blocks_override": 16},
    "chains too": {"tree": TREES["star"], "lookup": True, "max_num_seqs": 5},
    "schedule": {"tree": SMALL_BUSHY, "schedule": [(1, 2, 15), (3, 4, 5), (5, 6, 1), (7, 64, 0)]},
}


@pytest.fixture(scope="module")
def engines(models, heads, module_engine):
    """The engine without trees (None), and those with trees by name; each is started once."""
    model = add_byte_tokenizer(models("llama", seed=3))

    def start(name):
        options = dict(ENGINES[name]) if name else {}
        if name:
            tree, schedule = options.pop("tree"), options.pop("schedule", None)
            more = {"lookup": options.pop("lookup", False)}
            if schedule:
                more["num_speculative_tokens_per_batch_size"] = schedule
            options |= medusa(heads(max(map(len, tree))), tree, **more)
            options |= {"block_size": 32, "enable_prefix_caching": True}
        grammars = {"backend": "xgrammar", "disable_any_whitespace": True}
        return module_engine(
            model,
            skip_tokenizer_init=False,
            structured_outputs_config=grammars,
            max_model_len=256,
            **options,
        )

    return start


@dataclass
class Request:
    """One request of a session.

    Attributes:
        number: of its prompt.
        shared: how many first tokens of its prompt all prompts share.
        params: sampling parameters.
        arrival: the step before which it comes.
        abort: the step before which it is aborted, if it is.
    """

    number: int
    shared: int
    params: dict[str, object]
    arrival: int
    abort: int | None

    @property
    def prompt(self) -> list[int]:
        return (
            make_prompts(1, ASCII, prefix=self.shared)[0][: self.shared]
            + (make_prompts(1, ASCII, longest=90, seed=self.number)[0])
        )


token = st.integers(3, VOCAB - 1)
OPTIONS = {
    "top_k": st.integers(1, 40),
    "top_p": st.floats(0.3, 1.0),
    "min_p": st.floats(0.0, 0.3),
    "repetition_penalty": st.floats(0.8, 1.8),
    "presence_penalty": st.floats(-1.0, 2.0),
    "frequency_penalty": st.floats(-1.0, 2.0),
    "logit_bias": st.dictionaries(token, st.floats(-5.0, 5.0), max_size=4),
    "logprobs": st.integers(0, 5),
    "prompt_logprobs": st.integers(0, 3),
    "n": st.integers(1, 3),
}
# Beside a grammar these may leave no token that may come next.
UNLESS_GRAMMAR = {
    "allowed_token_ids": st.lists(token, min_size=8, max_size=60, unique=True),
    "bad_words": st.lists(st.sampled_from(["a", "ab", "{", '"', "1"]), min_size=1, max_size=3),
    "stop_token_ids": st.lists(token, max_size=9),
    "min_tokens": st.integers(0, 12),
}


@st.composite
def requests(draw):
    """A request; with a seed, so that sampled texts can be compared."""
    kind = draw(st.integers(0, 2**16))
    options = dict(OPTIONS)
    params = {"seed": kind, "max_tokens": draw(st.integers(12, fewer(48, 24)))}
    params["temperature"] = draw(st.sampled_from([0.0, 0.0, 0.3, 0.7, 1.0, 1.5]))
    if params["temperature"] >= 1 and draw(st.booleans()):
        params["seed"] = None  # drafts are drawn
    params["ignore_eos"] = draw(st.booleans())
    if draw(st.integers(0, 3)) == 0:
        spec = random_spec(random.Random(kind))
        params["structured_outputs"] = StructuredOutputsParams(**spec)
    else:
        options |= UNLESS_GRAMMAR
    for name in draw(st.lists(st.sampled_from(sorted(options)), max_size=4, unique=True)):
        params[name] = draw(options[name])
    shared = draw(st.sampled_from([0, 0, 33, 64]))
    arrival = draw(st.integers(0, 12))
    abort = arrival + draw(st.integers(0, 12)) if draw(st.integers(0, 4)) == 0 else None
    if params["temperature"] == 0.0 or abort is not None:
        params["n"] = 1
    if abort is None:
        params["output_kind"] = RequestOutputKind.FINAL_ONLY  # all n answers together
    return Request(kind, shared, params, arrival, abort)


@settings(
    max_examples=NUM_SESSIONS,
    deadline=None,
    derandomize="FUZZ_SESSIONS" not in os.environ,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a session takes a second: no shrinking
)
@given(name=st.sampled_from(sorted(ENGINES)), session=st.lists(requests(), min_size=1, max_size=10))
def test_sessions(name, session, engines):
    prompts = [request.prompt for request in session]
    each = [request.params for request in session]
    expected = generate(engines(None), prompts, each, detokenize=True)
    known = {
        tuple(prompt): list(output.outputs[0].token_ids)
        for prompt, output in zip(prompts, expected, strict=True)
    }
    arrivals, aborts = {}, {}
    for number, request in enumerate(session):
        arrivals.setdefault(request.arrival, {})[str(number)] = request.prompt
        if request.abort is not None:
            aborts.setdefault(request.abort, []).append(str(number))
    params = {str(number): own for number, own in enumerate(each)}

    llm = engines(name)
    with watching() as watch, oracle_drafts(Oracle(known, VOCAB)):
        said = step_through(llm, arrivals, aborts, params, detokenize=True)

    for number, (request, should) in enumerate(zip(session, expected, strict=True)):
        if request.params["seed"] is None and request.params["temperature"]:
            assert_keeps_to_its_rules(said.get(str(number)), request)
        elif request.abort is None:
            assert_same(said[str(number)], should)
        elif str(number) in said:
            assert_begins(said[str(number)], should)
    assert_empty(llm)
    event(f"{name}: preempted {min(watch.preemptions, 3)}")
    event(f"longest path {max(watch.lengths, default=0)}")


def assert_same(found, expected):
    assert found.finished
    for here, there in zip(found.outputs, expected.outputs, strict=True):
        assert list(here.token_ids) == list(there.token_ids)
        assert here.text == there.text
        assert (here.finish_reason, here.stop_reason) == (there.finish_reason, there.stop_reason)
        assert (here.logprobs is None) == (there.logprobs is None)
        for mine, other in zip(here.logprobs or (), there.logprobs or (), strict=True):
            assert possible(mine) == pytest.approx(possible(other), abs=1e-3)


def assert_keeps_to_its_rules(found, request):
    if found is None:
        assert request.abort is not None
        return
    params = request.params
    assert found.finished or request.abort is not None
    for here in found.outputs:
        assert len(here.token_ids) <= params["max_tokens"]
        if here.finish_reason == "length":
            assert len(here.token_ids) == params["max_tokens"]
        assert set(here.token_ids) <= set(params.get("allowed_token_ids", range(VOCAB)))
        if here.finish_reason == "stop":
            assert len(here.token_ids) >= params.get("min_tokens", 0)


def possible(logprobs):
    """The logprobs by token. Tokens that cannot come are all alike: any of them may be named."""
    return {
        token: value.logprob for token, value in logprobs.items() if value.logprob > float("-inf")
    }


def assert_begins(found, expected):
    """What an aborted request has said is how its text begins."""
    for here in found.outputs:
        there = expected.outputs[here.index]
        assert list(here.token_ids) == list(there.token_ids)[: len(here.token_ids)]


def test_the_options_are_ones_of_vllm():
    """A misspelt option would be none."""
    assert {*OPTIONS, *UNLESS_GRAMMAR} <= set(SamplingParams.__struct_fields__)
