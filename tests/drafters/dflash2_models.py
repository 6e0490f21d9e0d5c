"""A tiny DFlash 2 drafter of random weights, and its lattice written as a loop."""

from __future__ import annotations

from typing import Any

import torch
from dflash_models import BLOCK, MASK
from transformers import PreTrainedModel

from hf_treespec.drafters import DraftState
from hf_treespec.drafters.dflash2 import DFlash2Config, DFlash2Drafter, DFlash2Session

#: Candidates of a depth, and rank of the selector.
CANDIDATES, RANK = 6, 8


def tiny_dflash2(target: PreTrainedModel, seed: int = 2, **overrides: Any) -> DFlash2Drafter:
    """Two layers; convolutions, norms and selector are random, so that each of them matters."""
    fields: dict[str, Any] = {
        "num_hidden_layers": 2,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "selector_rank": RANK,
        "selector_top_k": CANDIDATES,
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    drafter = DFlash2Drafter(DFlash2Config.for_target(target.config, **{**fields, **overrides}))
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif "_conv." in name or "candidate_selector." in name:
            parameter.data.normal_(0.0, 0.4)
    return drafter.eval()


@torch.no_grad()
def loop_lattice(
    session: DFlash2Session, fresh: DFlash2Session, state: DraftState
) -> list[list[list[tuple[list[int], list[float], list[int]]]]]:
    """Tokens, log-probabilities and next slots of every row, depth and parent slot, pair by pair.

    `fresh` is a session without context beside the state's, which drafts the states again.
    """
    selector = session.drafter.candidate_selector
    rows = []
    for row, states in enumerate(fresh.draft(state)[:, 1 : state.depth + 1]):
        logits = session.modules.logits(states)
        candidates = [depth.topk(session.candidates).indices.tolist() for depth in logits]
        depths = []
        for depth, vector in enumerate(states):
            gate, slots = selector.hidden_projection(vector), []
            for before in candidates[depth - 1] if depth else [int(state.anchors[row])]:
                scores = [
                    float(logits[depth, token])
                    + float((selector.predecessor_codebook[before] * gate) @ selector.successor_codebook[token])
                    for token in candidates[depth]
                ]
                scaled = (torch.tensor(scores) / session.temperature).log_softmax(-1).tolist()
                order = sorted(range(len(scaled)), key=lambda index: -scaled[index])[: state.width]
                last = depth == len(states) - 1
                slots.append(
                    (
                        [candidates[depth][index] for index in order],
                        [scaled[index] for index in order],
                        [-1 if last else index for index in order],
                    )
                )
            depths.append(slots)
        rows.append(depths)
    return rows
