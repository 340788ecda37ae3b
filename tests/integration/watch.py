"""What vLLM's scheduler did with the trees: makes sure that a test met what it is about."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.triton_interpreter import ENABLED as INTERPRETED


class Watch:
    """Counts of what was scheduled.

    Attributes:
        steps: per step, how many requests were served as what: "chunk" (a prompt or a piece of
            one), "decode" (one token), "tree" (all nodes), "cut" (fewer) or "padded" (nodes
            without tokens, -1, which vLLM gives to a request that reads one token only).
        num_nodes: how often trees of each size were scheduled.
        lengths: how often a path of each length was accepted, by steps with trees.
        longest_of: the longest path that was accepted, by the engine's names of requests.
        preemptions: how often a request was preempted.
    """

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []
        self.num_nodes: Counter[int] = Counter()
        self.lengths: Counter[int] = Counter()
        self.longest_of: Counter[str] = Counter()
        self.preemptions = 0

    def met(self, *kinds: str) -> bool:
        """Whether some step served requests of all these kinds together."""
        return any(all(step[kind] for kind in kinds) for step in self.steps)

    def saw_schedule(self, scheduler: Scheduler, output) -> None:
        step: Counter[str] = Counter()
        for request, num_tokens in output.num_scheduled_tokens.items():
            drafts = output.scheduled_spec_decode_tokens.get(request, [])
            if drafts:
                assert num_tokens == len(drafts) + 1
                self.num_nodes[len(drafts)] += 1
            # Scheduled ahead of the device, all drafts are placeholders to the scheduler.
            if -1 in drafts and not INTERPRETED:
                step["padded"] += 1
            elif drafts:
                step["tree" if len(drafts) == scheduler.num_spec_tokens else "cut"] += 1
            else:
                step["decode" if num_tokens == 1 else "chunk"] += 1
        if step:
            self.steps.append(step)

    def saw_result(self, scheduled, result) -> None:
        for request, tokens in zip(result.req_ids, result.sampled_token_ids, strict=True):
            if tokens and scheduled.scheduled_spec_decode_tokens.get(request):
                length = len(tokens) - 1
                self.lengths[length] += 1
                self.longest_of[request] = max(length, self.longest_of[request])

    def longest(self, output) -> int:
        """The longest path that was accepted for the request of this output."""
        # vLLM puts a number in front of it where there are several choices, and something random
        # behind it.
        lengths = (
            length
            for name, length in self.longest_of.items()
            if name.split("-")[0].split("_")[-1] == output.request_id
        )
        return max(lengths, default=0)


@contextmanager
def watching() -> Iterator[Watch]:
    """Watch the schedulers of all engines in this process."""
    watch = Watch()
    schedule, update = Scheduler.schedule, Scheduler.update_from_output
    preempt = Scheduler._preempt_request

    def watched_schedule(self, *args, **kwargs):
        output = schedule(self, *args, **kwargs)
        watch.saw_schedule(self, output)
        return output

    def watched_update(self, scheduled, result, *args, **kwargs):
        watch.saw_result(scheduled, result)
        return update(self, scheduled, result, *args, **kwargs)

    def watched_preempt(self, *args, **kwargs):
        watch.preemptions += 1
        return preempt(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "schedule", watched_schedule)
        patch.setattr(Scheduler, "update_from_output", watched_update)
        patch.setattr(Scheduler, "_preempt_request", watched_preempt)
        yield watch
