"""Folders and targets of the published dialects, from the golden files."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from golden_inputs import ANCHORS, TOKENS, VOCAB, features, rows, tensors
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_treespec.drafters import DraftState
from hf_treespec.drafters.dflash import DFlashDrafter, DFlashSession

GOLDEN = Path(__file__).parent / "golden"
#: Dialects whose golden files hold the logits of blocks.
DIALECTS = (
    "zlab",
    "zlab_sliding",
    "jetspec",
    "jetspec_adapter",
    "deepspec",
    "speculators",
    "speculators_anchor",
    "treeflash",
)


@functools.cache
def golden(name: str) -> dict[str, Any]:
    """A golden file."""
    found: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return found


def published(
    folder: Path, name: str, extra: dict[str, torch.Tensor] | None = None, shards: int = 1, **overrides: Any
) -> Path:
    """Writes a checkpoint as the dialect's own code does, with `extra` tensors and overriding fields."""
    data = golden(name)
    held = {key: torch.from_numpy(value) for key, value in tensors(data["shapes"]).items()} | (extra or {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**data["config"], **overrides}), encoding="utf-8")
    if shards == 1:
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    index = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: held[key] for key in sorted(held)[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    whole = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(whole), encoding="utf-8")
    return folder


@functools.cache
def golden_target(width: int = 32) -> Qwen3ForCausalLM:
    """A random target whose embedding and head are the ones that the golden files' drafters borrowed."""
    torch.manual_seed(4)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    target = Qwen3ForCausalLM(config).eval()
    target.get_input_embeddings().weight.data.copy_(torch.from_numpy(rows("embedding", width)))
    target.get_output_embeddings().weight.data.copy_(torch.from_numpy(rows("head", width)))
    return target


def target_of(drafter: DFlashDrafter) -> Qwen3ForCausalLM:
    """The golden target of the width that a drafter takes features of."""
    return golden_target(drafter.config.target_hidden_size)


def golden_states(drafter: DFlashDrafter, session: DFlashSession, width: int = 11) -> list[DraftState]:
    """The two rounds of the golden files."""
    given = torch.from_numpy(features(drafter.config.target_hidden_size))
    parts = given.chunk(len(session.feature_layers), dim=-1)
    fused = sum(session.fuse(index, part) for index, part in enumerate(parts))
    assert isinstance(fused, torch.Tensor)
    states, done = [], 0
    for anchor, token in zip(ANCHORS, TOKENS, strict=True):
        states.append(
            DraftState(
                anchors=torch.tensor([token]),
                positions=torch.tensor([anchor]),
                features=fused[:, done:anchor],
                feature_positions=torch.arange(done, anchor)[None],
                feature_valid=None,
                depth=drafter.drafted_depths,
                width=width,
            )
        )
        done = anchor
    return states
