"""Generate with one engine whose ranks are on the nodes of a Ray cluster.

    ray start --head                       # on one node
    ray start --address=HEAD_NODE:6379     # on each of the others
    python examples/ray_tensor_parallel.py MODEL HEADS --tensor-parallel-size 2

MODEL and HEADS are hub ids, or folders that are at the same path on every node. `vllm serve` takes
`--distributed-executor-backend ray --tensor-parallel-size 2 --speculative-model medusa:HEADS`.
"""

import argparse

from vllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate over the nodes of a Ray cluster.")
    parser.add_argument("model", help="the target")
    parser.add_argument("heads", help="its heads")
    parser.add_argument("--tensor-parallel-size", type=int, default=2, help="ranks, one a GPU")
    parser.add_argument("--dtype", default="auto", help="type of the weights")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    llm = LLM(
        args.model,
        dtype=args.dtype,
        distributed_executor_backend="ray",
        tensor_parallel_size=args.tensor_parallel_size,
        speculative_config={"method": "medusa", "model": args.heads},
    )
    prompts = ["The sky is blue because", "def reverse(text):"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=args.max_tokens))
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"\n# {prompt}\n{output.outputs[0].text}")


# vLLM starts its engine as a new process, which reads this file again.
if __name__ == "__main__":
    main()
