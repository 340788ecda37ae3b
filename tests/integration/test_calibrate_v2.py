"""The cost of a step on vLLM's V2 runner, which is the one that GPUs have."""

import pytest

from tests.integration.generation import medusa
from tests.integration.tiny import make_heads
from tests.integration.watch import watching
from tests.triton_interpreter import ENABLED as INTERPRETED
from vllm_medusa.calibration.cost import CostOptions, _measure_batch, _StepMeter

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter: make test-v2", allow_module_level=True)


def test_steps_of_the_size_asked_for_are_timed_by_part(models, engine, tmp_path):
    options = CostOptions(context=8, steps=2, rounds=2)
    tree = [[0], [1], [0, 0]]
    heads = make_heads(tmp_path / "heads", 2)
    llm = engine(models(), **medusa(heads, tree), max_num_seqs=2)
    with watching() as watch:
        meter = _StepMeter(llm, options)
        for batch_size, nodes in [(1, 0), (1, 3), (2, 1)]:
            times = meter.turn(batch_size, nodes)
            assert len(times) == options.steps
            for part in times:
                assert 0 < part["forward"] < part["step"]
                assert 0 < part["drafting"] < part["step"] - part["forward"]
    assert set(watch.num_nodes) == {1, 3}
    cost = _measure_batch(meter, 2, tokens=[1.0, 1.5, 1.8, 2.0], options=options)
    assert {0, 1} <= set(cost.seconds())
    assert all(0 < size.forward < size.step and size.drafting > 0 for size in cost.sizes)
