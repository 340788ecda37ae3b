"""A chat in the terminal with a running server: answers as they come, and how they came.

    make serve                              # in one terminal
    python examples/streaming_chat.py       # in another; an empty line or Ctrl-D ends it

A step that accepts drafts yields several tokens at once, so they arrive in fewer chunks than there
are tokens: what is printed behind each answer shows it.
"""

import argparse
import time
from collections.abc import Iterator

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat with a vLLM server.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-tokens", type=int, default=256, help="per answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()

    client = OpenAI(base_url=f"http://{args.host}:{args.port}/v1", api_key="unused")
    model = client.models.list().data[0].id
    messages: list[dict[str, str]] = []
    for question in questions():
        messages.append({"role": "user", "content": question})
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            stream=True,
            stream_options={"include_usage": True},
        )
        parts, tokens = [], 0
        start = time.monotonic()
        for chunk in stream:
            if chunk.choices and (text := chunk.choices[0].delta.content):
                parts.append(text)
                print(text, end="", flush=True)
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
        seconds = time.monotonic() - start
        print(f"\n[{tokens} tokens in {len(parts)} chunks, {tokens / seconds:.1f} tokens/s]\n")
        messages.append({"role": "assistant", "content": "".join(parts)})


def questions() -> Iterator[str]:
    """What is typed, line by line, until there is nothing."""
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            return
        if not question:
            return
        yield question


if __name__ == "__main__":
    main()
