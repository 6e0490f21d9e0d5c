"""Trains the models that come in the package, from the Python standard library's sources to the finished pair.

    python examples/train_embedded.py --work build/embedded            # every stage, resumable
    python examples/train_embedded.py --work build/embedded --stage target

Stages: `corpus` (manifest, tokenizer, token streams), `target`, `continuations` (text the target writes), `drafter`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from hf_treespec.drafters.dflash import DFlashConfig, DFlashDrafter
from hf_treespec.training import corpus
from hf_treespec.training.causal_lm import train_causal_lm
from hf_treespec.training.continuations import load_continuations, write_continuations
from hf_treespec.training.dflash import initialise_from_target, train_dflash

STAGES = ("corpus", "target", "continuations", "drafter")
SEED = 0
VOCAB_SIZE = 1024
PROMPT_LENGTH, NEW_TOKENS = 128, 384
TEMPERATURE = 0.8


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


def load_target(work: Path) -> Qwen3ForCausalLM:
    """The trained target in float32, as it is decoded with."""
    return Qwen3ForCausalLM.from_pretrained(work / "target", dtype=torch.float32).eval()


def sample_texts(work: Path, sequences: int) -> None:
    """Samples the target's continuations of training prompts, and a few of held-out prompts to evaluate on."""
    target = load_target(work)
    for split, count in (("held_out", 64), ("train", sequences)):
        write_continuations(
            target,
            np.load(work / f"{split}.npy"),
            work / f"continuations_{split}",
            sequences=count,
            prompt_length=PROMPT_LENGTH,
            new_tokens=NEW_TOKENS,
            temperature=TEMPERATURE,
            seed=SEED,
        )


def train_drafter(work: Path, steps: int) -> None:
    """Trains the drafter on the target's own text and as much real text, and saves it in half precision."""
    torch.manual_seed(SEED)
    target = load_target(work)
    mask_token_id = AutoTokenizer.from_pretrained(work / "target").mask_token_id
    config = DFlashConfig.for_target(
        target.config,
        num_hidden_layers=2,
        block_size=8,
        mask_token_id=mask_token_id,
        target_layer_ids=[1, 4, 7, 10],
    )
    drafter = initialise_from_target(DFlashDrafter(config), target, layers=[0, target.config.num_hidden_layers - 1])
    written = load_continuations(work / "continuations_train")
    length = written.shape[1]
    stream = np.load(work / "train.npy")
    windows = stream[: len(stream) // length * length].reshape(-1, length)
    picked = np.random.default_rng(SEED).permutation(len(windows))[: len(written)]
    held_out = load_continuations(work / "continuations_held_out")
    metrics = train_dflash(
        drafter,
        target,
        np.concatenate([written, windows[picked]]),
        held_out,
        work / "drafter_run",
        prompt_length=PROMPT_LENGTH,
        temperature=TEMPERATURE,
        tree_nodes=(8, 16, 32),
        optimizer="muon",
        learning_rate=6e-3,
        max_steps=steps,
        seed=SEED,
    )
    drafter.to(torch.float16).save_pretrained(work / "drafter")
    (work / "drafter_metrics.json").write_text(json.dumps(metrics, indent=2))
    print(json.dumps(metrics, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for everything the run writes")
    parser.add_argument("--stage", choices=STAGES, help="one stage instead of all")
    parser.add_argument("--target-steps", type=int, default=1000)
    parser.add_argument("--continuations", type=int, default=2176, help="sequences the target writes for the drafter")
    parser.add_argument("--drafter-steps", type=int, default=3000)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.stage in (None, "corpus"):
        prepare_corpus(arguments.work)
    if arguments.stage in (None, "target"):
        train_target(arguments.work, arguments.target_steps)
    if arguments.stage in (None, "continuations"):
        sample_texts(arguments.work, arguments.continuations)
    if arguments.stage in (None, "drafter"):
        train_drafter(arguments.work, arguments.drafter_steps)


if __name__ == "__main__":
    main()
