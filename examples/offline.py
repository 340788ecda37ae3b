"""Generate with Medusa heads, offline.

    python examples/offline.py MODEL HEADS

Without arguments it takes the demo's model and heads. On a CPU, first:
`eval "$(python -m vllm_medusa.cpu_setup --print-env)"`.
"""

import argparse

from vllm import LLM, SamplingParams

from vllm_medusa.demo.model import demo_model


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate with Medusa heads, offline.")
    parser.add_argument("model", nargs="?", help="the target (default: the demo's)")
    parser.add_argument("heads", nargs="?", default="heads/smollm2-135m-instruct")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--enforce-eager", action="store_true", help="start faster, run slower")
    args = parser.parse_args()

    llm = LLM(
        args.model or str(demo_model()),
        dtype="float32",
        max_model_len=1024,
        enforce_eager=args.enforce_eager,
        # By default vLLM asks for most of the machine's memory, and fails where it is not free.
        kv_cache_memory_bytes=2**30,
        speculative_config={"method": "medusa", "model": args.heads},
    )
    questions = ["Why is the sky blue?", "Write a Python function that reverses a string."]
    answers = llm.chat(
        [[{"role": "user", "content": question}] for question in questions],
        SamplingParams(temperature=0.0, max_tokens=args.max_tokens),
    )
    for question, answer in zip(questions, answers, strict=True):
        print(f"\n# {question}\n{answer.outputs[0].text}")


# vLLM starts its engine as a new process, which reads this file again.
if __name__ == "__main__":
    main()
