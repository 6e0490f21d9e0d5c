"""Trains the models that come in the package, from the Python standard library's sources to the finished pair.

    python examples/train_embedded.py --work build/embedded            # every stage, resumable
    python examples/train_embedded.py --work build/embedded --stage target

Stages: `corpus` (manifest, tokenizer, token streams), `target`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from hf_treespec.training import corpus
from hf_treespec.training.causal_lm import train_causal_lm

SEED = 0
VOCAB_SIZE = 1024


def prepare_corpus(work: Path) -> None:
    """Writes the manifest, the tokenizer and the token streams of both splits."""
    files = corpus.build_manifest()
    corpus.save_manifest(files, work / "manifest.jsonl")
    tokenizer = corpus.train_tokenizer(corpus.read_texts(files, "train"), VOCAB_SIZE)
    tokenizer.save_pretrained(work / "target")
    for split in ("train", "held_out"):
        np.save(work / f"{split}.npy", corpus.tokenize(corpus.read_texts(files, split), tokenizer))


def target_config() -> Qwen3Config:
    """A deep and narrow Qwen3, so that a two-layer drafter is relatively as cheap as in real pairs."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )


def train_target(work: Path, steps: int) -> None:
    """Trains the target and saves it in half precision, with the metrics of the held-out split."""
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(target_config())
    train, held_out = np.load(work / "train.npy"), np.load(work / "held_out.npy")
    metrics = train_causal_lm(model, train, held_out, work / "target_run", max_steps=steps, seed=SEED)
    model.to(torch.float16).save_pretrained(work / "target")
    AutoTokenizer.from_pretrained(work / "target").save_pretrained(work / "target")
    (work / "target_metrics.json").write_text(json.dumps(metrics, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for everything the run writes")
    parser.add_argument("--stage", choices=["corpus", "target"], help="one stage instead of all")
    parser.add_argument("--target-steps", type=int, default=2000)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.stage in (None, "corpus"):
        prepare_corpus(arguments.work)
    if arguments.stage in (None, "target"):
        train_target(arguments.work, arguments.target_steps)


if __name__ == "__main__":
    main()
