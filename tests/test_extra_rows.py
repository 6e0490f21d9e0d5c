"""The seam for drafters that draft inside the target: extra rows ride in the verification forward.

A fake fused drafter hangs a group of mask rows on every node. Its rows see what their node sees and each other, come
back as hidden states, and leave everything else alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import WINDOW, batch, decoder_layers, prompt, target
from parity import GREEDY, SAMPLED, Inputs, compare, run
from rigged import RiggedSession, rigged, rows_of
from test_exactness import check_features

from hf_treespec.drafters.base import DraftState, ExtraRows
from hf_treespec.trees import DraftLattice, DraftTree

GROUP = 2


class FusedSession(RiggedSession):
    """Asks for `GROUP` mask rows behind every node and keeps what comes back for them."""

    rows_per_node = 1 + GROUP

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.back: list[tuple[DraftTree, list[int], torch.Tensor]] = []
        self.sent: tuple[DraftTree, list[int]] | None = None
        self.starts: list[int] = []

    def extra_rows(self, tree: DraftTree) -> ExtraRows:
        super().extra_rows(tree)
        self.sent = (tree, self.starts)
        nodes = torch.arange(len(tree)).repeat_interleave(GROUP).expand(tree.batch_size, -1)
        steps = torch.arange(GROUP).repeat(len(tree)) + 1
        return ExtraRows(
            tokens=torch.full_like(nodes, self.config.mask_token_id),
            depths=tree.depths.gather(1, nodes) + steps,
            nodes=nodes,
            groups=nodes,
        )

    def propose(self, state: DraftState) -> DraftLattice:
        self._collect(state)
        self.starts = state.positions.tolist()
        return super().propose(state)

    def observe(self, state: DraftState) -> None:
        self._collect(state)
        super().observe(state)

    def _collect(self, state: DraftState) -> None:
        if self.sent is not None:
            tree, starts = self.sent
            assert state.extra_hidden is not None, "the extra rows' hidden states did not come back"
            assert state.extra_hidden.shape == (tree.batch_size, GROUP * len(tree), self.config.hidden_size)
            self.back.append((tree, starts, state.extra_hidden.clone()))
            self.sent = None


@torch.no_grad()
def alone(network: Any, text: list[int], mask_token: int) -> torch.Tensor:
    """Last decoder layer's output for a group of mask rows behind a text, `[GROUP, H]`."""
    length = len(text)
    seen = torch.ones(length + GROUP, length + GROUP, dtype=torch.bool).tril()
    seen[length:, length:] = True
    place = torch.arange(length + GROUP)
    masks = {}
    for kind, window in (("full_attention", 10**6), ("sliding_attention", WINDOW)):
        visible = seen & (place[:, None] - place[None] < window)
        masks[kind] = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
    config = network.config.get_text_config()
    kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    mask = masks if hasattr(config, "layer_types") else masks[kind]
    kept: list[torch.Tensor] = []
    last = decoder_layers(network)[-1]
    handle = last.register_forward_hook(lambda module, args, output: kept.append(output))
    tokens = torch.tensor([[*text, *[mask_token] * GROUP]])
    network(input_ids=tokens, attention_mask=mask, position_ids=place[None], use_cache=False)
    handle.remove()
    return (kept[0][0] if isinstance(kept[0], tuple) else kept[0])[0, length:]


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "quantized": {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
}


# QuantizedCache takes full attention layers only.
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("family", "attention", "cache"),
    [
        *(("qwen3", attention, cache) for attention in ("sdpa", "treespec") for cache in CACHES),
        *((family, "eager", cache) for family in ("gemma3", "mistral") for cache in ("dynamic", "static")),
    ],
)
def test_extra_rows(family: str, attention: str, rows: int, cache: str) -> None:
    network = target(family, attention)
    inputs: Inputs = prompt(12, seed=3) if rows == 1 else batch(seed=6)
    drafter = rigged([], "half", seed=1, session_class=FusedSession)
    options = {"max_new_tokens": 14, **CACHES[cache]}
    _, _, view = compare(network, inputs, drafter=drafter, decoding={"budget": 6}, **options, **SAMPLED)
    assert view.last_report.mean_nodes <= 6, "extra rows are no nodes"
    (session,) = drafter.rig.sessions
    assert len(session.back) >= view.last_report.drafted_rounds - 1 > 0
    if cache == "quantized":
        return
    check_features(session, drafter.rig, network, drafter.rig.rows)
    worst = 0.0
    for tree, starts, hidden in session.back[:: max(1, len(session.back) // 3)]:
        for row, start in enumerate(starts):
            if not session.alive(row, start):
                continue
            for node in range(tree.sizes[row]):
                path, at = [], node
                while at >= 0:
                    path.append(int(tree.tokens[row, at]))
                    at = int(tree.parents[row, at])
                expected = alone(network, drafter.rig.rows[row][:start] + path[::-1], drafter.config.mask_token_id)
                got = hidden[row, GROUP * node : GROUP * (node + 1)]
                worst = max(worst, float((expected - got).abs().max() / expected.abs().max().clamp(min=1)))
    assert worst < 5e-5


def test_a_drafter_without_extra_rows_gets_none_back() -> None:
    inputs = prompt()
    rows = rows_of(run(target("qwen3", "sdpa"), inputs, max_new_tokens=10, **GREEDY).sequences, inputs)
    view = rigged(rows).with_options(budget=4)
    run(target("qwen3", "sdpa"), inputs, max_new_tokens=10, assistant_model=view, **GREEDY)
    assert all(call["extra_hidden"] is None for call in view.rig.calls)
