"""Chats with a model through a pipeline, sped up by a drafter that is given by its id.

    python examples/pipeline_chat.py Qwen/Qwen3-8B z-lab/Qwen3-8B-DFlash-b16

Answers are streamed as they are written. An empty line ends the chat.
"""

from __future__ import annotations

import argparse

from transformers import TextStreamer, pipeline

import hf_treespec  # noqa: F401  (teaches the pipeline to take a drafter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="the model to chat with: Hub id or folder")
    parser.add_argument("drafter", help="its drafter: Hub id or folder")
    parser.add_argument("--system", help="what the model is told first")
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="most tokens of an answer")
    parser.add_argument("--report", action="store_true", help="say after each answer how it was decoded")
    arguments = parser.parse_args()
    generator = pipeline(
        "text-generation", arguments.target, assistant_model=arguments.drafter, dtype="auto", device_map="auto"
    )
    chat = [{"role": "system", "content": arguments.system}] if arguments.system else []
    while question := ask():
        chat.append({"role": "user", "content": question})
        streamer = TextStreamer(generator.tokenizer, skip_prompt=True, skip_special_tokens=True)
        chat = generator(chat, streamer=streamer, max_new_tokens=arguments.max_new_tokens)[0]["generated_text"]
        if arguments.report:
            print(generator.assistant_model.last_report)


def ask() -> str:
    """The next question; empty where there is none."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    main()
