"""An engine on a Ray cluster, for test_ray.py: prints what it generated and what its ranks saw.

python ray_generate.py ARGUMENTS     # a JSON object: model, engine (options), prompts
"""

import json
import sys

import torch
from vllm import LLM, SamplingParams

SEED = 7


def where(worker):
    """Where a worker runs and as what. In a worker, like all functions that take one."""
    import ray

    return ray.get_runtime_context().get_node_id(), type(worker.worker).__qualname__


def plugin_is_loaded(worker):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs.create_speculative_config.__code__.co_filename.endswith("plugin.py")


def seed(worker, number, differently):
    """Seed the random numbers that requests without a seed use."""
    torch.manual_seed(number + (worker.rank if differently else 0))


def watch(worker):
    """From now on note every step's collectives, and the tokens that the rank kept."""
    from vllm.distributed import get_tp_group

    runner, group = worker.model_runner, get_tp_group()
    runner.seen_steps = []
    execute, sample = runner.execute_model, runner._sample

    def execute_model(*args, **kwargs):
        runner.seen_steps.append({"collectives": [], "tokens": None})
        return execute(*args, **kwargs)

    def _sample(*args, **kwargs):
        output = sample(*args, **kwargs)
        runner.seen_steps[-1]["tokens"] = output.sampled_token_ids.tolist()
        runner.seen_steps[-1]["rows"] = runner.last_rows.tolist()
        return output

    def noting(name):
        collective = getattr(group, name)

        def noted(tensor, *args, **kwargs):
            size = tensor.numel() * tensor.element_size()
            runner.seen_steps[-1]["collectives"].append([name, size])
            return collective(tensor, *args, **kwargs)

        setattr(group, name, noted)

    runner.execute_model, runner._sample = execute_model, _sample
    for name in ("all_reduce", "all_gather", "broadcast"):
        noting(name)


def seen(worker):
    """What was noted since the last call."""
    steps = worker.model_runner.seen_steps
    worker.model_runner.seen_steps = []
    return steps


def main():
    arguments = json.loads(sys.argv[1])
    llm = LLM(arguments["model"], distributed_executor_backend="ray", **arguments["engine"])

    def generate(prompts, **params):
        params = SamplingParams(ignore_eos=True, detokenize=False, **params)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def sample_each(differently):
        """Each prompt by itself, without a seed of its own, from the same state of the ranks'."""
        texts = []
        for prompt in arguments["prompts"]:
            llm.collective_rpc(seed, args=(SEED, differently))
            texts += generate([prompt], temperature=0.8, max_tokens=24)
        return texts

    result = {
        "where": llm.collective_rpc(where),
        "plugin": llm.collective_rpc(plugin_is_loaded),
        "greedy": generate(arguments["prompts"], temperature=0, max_tokens=48),
        "sampled": sample_each(differently=False),
    }
    llm.collective_rpc(watch)
    result["sampled, ranks seeded differently"] = sample_each(differently=True)
    result["steps, sampled"] = llm.collective_rpc(seen)
    generate(arguments["prompts"][:1], temperature=0, max_tokens=48)
    result["steps, greedy"] = llm.collective_rpc(seen)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
