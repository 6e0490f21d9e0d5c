"""What a FlexDraft drafter keeps during one `generate` call: its hooks on the target, and what they brought back."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from ...attention.interface import TreeAttention, armed
from ...attention.masks import LayerKind, tree_mask
from ...caches import TreeLayer, TreeStaticLayer, scratch_forward
from ...configuration import TreeSpecConfig
from ...transfer import to_device
from ...trees import DraftLattice, DraftTree
from ..base import DraftSession, DraftState, ExtraRows, TargetModules
from .attention_tuning import AttentionTuning
from .layout import decoder_of, final_norm_of
from .mask_rows import MaskRows
from .modes import Mode, ModeCosts, costs_of
from .options import FlexDraftOptions

if TYPE_CHECKING:
    from .modeling_flexdraft import FlexDraftDrafter


class FlexDraftSession(DraftSession):
    """One `generate` call's drafting inside the target.

    A draft is a group of `block_size` mask rows behind the last committed token but the anchor: the first stands in
    the anchor's place, the others are the drafted depths. In parallel mode groups ride behind the nodes of the tree
    that is being verified; the group of the node the walk ends on is the next draft. Sequential drafts run the same
    group by itself, over the target's cache. Both give the same draft, so that a round may choose, and a sequential
    one stands in where no group rode.

    The target's cache is the whole context; the session has none of its own.
    """

    def __init__(self, drafter: FlexDraftDrafter, target: PreTrainedModel, batch_size: int, max_length: int) -> None:
        config = drafter.config
        self.drafter, self.batch_size = drafter, batch_size
        self.modules = TargetModules(target)
        self._target = weakref.ref(target)
        # Nothing is read of features; their layer reports whether the target runs hooks at all.
        self.feature_layers = (max(0, config.split_layer - 1),)
        self.options = FlexDraftOptions()
        self._held = [0] * batch_size
        self._tuning: AttentionTuning | None = None
        #: Nodes of the last verification that mask rows rode behind: the first ones.
        self._groups = 0
        #: What rounds cost in each mode, where that decides; the mode of the round under way and when it began.
        self._costs: ModeCosts | None = None
        self._round: tuple[Mode, float] | None = None
        #: The mode of the drafted round before, where it was the last one.
        self._drafted_in: Mode | None = None
        #: Columns of left padding in each row's cache; None until the call's first draft.
        self._padding: list[int] | None = None

    def configure(self, config: TreeSpecConfig) -> None:
        super().configure(config)
        self.options = config if isinstance(config, FlexDraftOptions) else FlexDraftOptions()
        target = self._target()
        if target is None:
            raise RuntimeError("the target a FlexDraft session drafts in is gone; start a new session.")
        self.close()
        # A session goes on with a later call: its hooks live as long as the call.
        self._tuning = self.drafter.tuning(target, self.options.flex_variant).attach()
        self._padding, self._groups = None, 0
        mode, self._costs = self.options.mode(self.batch_size), None
        self._round = self._drafted_in = None
        if self.options.flex_mode == "auto":
            circumstances = (self.batch_size, target.device, target.dtype, self.options)
            self._costs = costs_of(self.drafter.weights, circumstances, mode)
            mode = self._costs.best
        self.rows_per_node = 1 + self.drafter.config.block_size if mode == "parallel" else 1

    def close(self) -> None:
        if self._tuning is not None:
            self._tuning.detach()
        self._tuning = None

    @property
    def riding_rows(self) -> int:
        return 0 if self._tuning is None else self._tuning.boarded

    @property
    def rides(self) -> bool:
        mode = self.options.mode(self.batch_size) if self._costs is None else self._costs.best
        return mode == "parallel"

    @property
    def is_trial(self) -> bool:
        if self._costs is None or self._round is None:
            return False
        # What a round's draft takes is up to the mode of the round before, which it was made in.
        return not all(map(self._costs.prefers, {self._round[0], self._drafted_in or self._round[0]}))

    @property
    def lengths(self) -> list[int]:
        return list(self._held)

    def rollback(self, lengths: Sequence[int]) -> None:
        self._held = [min(held, kept) for held, kept in zip(self._held, lengths, strict=True)]

    def fuse(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[..., :0]

    def observe(self, state: DraftState) -> None:
        if state.feature_positions is None:
            return
        if state.feature_valid is None:
            fresh = [state.feature_positions.shape[1]] * self.batch_size
        else:
            fresh = state.feature_valid.sum(1).tolist()
        self._held = [held + count for held, count in zip(self._held, fresh, strict=True)]

    def extra_rows(self, tree: DraftTree) -> ExtraRows | None:
        """Lets the groups of the likeliest nodes ride in the coming forward; no rows of the forward's own."""
        tuning = self._attached()
        self._groups = 0
        tuning.board(None)
        if self._begin_round() == "sequential":
            return None
        size, groups, room = self.drafter.config.block_size, self._worth_a_group(tree), self._room()
        if room is not None:
            groups = min(groups, (room - len(tree)) // size)
        while groups > 0 and tuning.is_ambiguous(len(tree) + groups * size):
            groups -= 1
        if groups <= 0:
            return None
        self._groups = groups
        device = tree.tokens.device
        nodes = torch.arange(groups, device=device).repeat_interleave(size).expand(self.batch_size, -1)
        steps = torch.arange(1, size + 1, device=device).repeat(groups).expand(self.batch_size, -1)
        tuning.board(MaskRows(self.drafter.mask_embedding, nodes, steps, nodes, tree.depths))
        return None

    def _begin_round(self) -> Mode:
        """The mode of the round whose verification begins now; notes what the one before it took."""
        if self._costs is None:
            return self.options.mode(self.batch_size)
        now = time.perf_counter()
        self._drafted_in = None if self._round is None else self._round[0]
        if self._round is not None:
            self._costs.record(self._round[0], now - self._round[1])
        mode = self._costs.choose()
        self._round = mode, now
        return mode

    def _worth_a_group(self, tree: DraftTree) -> int:
        """How many of the nodes, which stand in the order of their path scores, bring mask rows along."""
        most = min(len(tree), self.options.flex_groups or len(tree))
        score = self.options.group_score(tree.tokens.device)
        if score and most > 1:
            likely = (tree.scores()[:, :most] >= score).sum(1).max()
            most = max(1, int(likely))
        return most

    @torch.no_grad()
    def propose(self, state: DraftState) -> DraftLattice:
        logits = self.draft_logits(state)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        best, tokens = logits.topk(min(state.width, logits.shape[-1]))
        log_probs = best - logits.logsumexp(-1, keepdim=True)
        if self.options.flex_verify_score:
            # The best path to a depth bounds every path to it.
            bound = log_probs[..., :1].cumsum(1) - log_probs[..., :1]
            log_probs = log_probs.masked_fill(bound + log_probs < math.log(self.options.flex_verify_score), -torch.inf)
        return DraftLattice.marginal(tokens, log_probs)

    @torch.no_grad()
    def draft_logits(self, state: DraftState) -> torch.Tensor:
        """Calibrated logits of the next depths, float32 `[B, depth, V]`."""
        self.observe(state)
        if state.accepted is None:
            self._round = None  # plain rounds since
        tuning = self._attached()
        group = self._brought(state)
        if group is None:
            group = self._draft_alone(state)
        tuning.board(None)
        normed = self._final_norm(group[:, 1 : state.depth + 1])
        return self.drafter.calibrated_logits(self.modules, normed, state.anchors)

    def _room(self) -> int | None:
        """Columns that a static cache has left for rows to pass through; None = no limit."""
        cache = self._attached().cache
        layers = [] if cache is None else cache.layers
        return min((layer.free_rows() for layer in layers if isinstance(layer, TreeStaticLayer)), default=None)

    def _attached(self) -> AttentionTuning:
        if self._tuning is None:
            raise RuntimeError("a FlexDraft session drafts between `configure` and `close` only.")
        return self._tuning

    def _final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        target = self._target()
        assert target is not None
        norm = final_norm_of(decoder_of(target)[0])
        weight = next(norm.parameters(), None)
        normed: torch.Tensor = norm(hidden if weight is None else hidden.to(weight.device))
        return normed

    def _brought(self, state: DraftState) -> torch.Tensor | None:
        """The groups `[B, block_size, H]` of the nodes the walks ended on; None if one of them had none."""
        hidden, accepted = self._attached().hidden, state.accepted
        if hidden is None or accepted is None or not self._groups:
            return None
        accepted = accepted.to(hidden.device)
        if bool((accepted >= self._groups).any()):
            return None
        size = self.drafter.config.block_size
        rows = accepted[:, None] * size + torch.arange(size, device=hidden.device)
        return hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))

    def _draft_alone(self, state: DraftState) -> torch.Tensor:
        """The groups `[B, S, H]` behind what is committed, from a forward of the last layers alone.

        S is the block size, or what a static cache has room for.
        """
        tuning, size = self._attached(), self.drafter.config.block_size
        cache, known = tuning.cache, tuning.positions
        if cache is None or known is None:
            raise RuntimeError(
                "a FlexDraft drafter reads the target's cache, which the loop of `generate(assistant_model=drafter)` "
                "prepares; it cannot draft in another loop."
            )
        layers = {kind: cache.layers[index] for kind, index in zip(tuning.kinds, tuning.layer_ids, strict=True)}
        room = self._room()
        size = size if room is None else min(size, room)
        rows = size + tuning.is_ambiguous(size)
        if room is not None and rows > room:
            rows = size = size - 1
        lengths = next(iter(layers.values())).rows.lengths
        paddings = self._paddings(state, lengths)
        even = len(set(lengths)) == 1 and not any(paddings)
        masks = self._masks(layers, size, rows, None if even else paddings)
        last = known.shape[-1] - 1
        ends = state.positions.new_full((self.batch_size,), last) if state.accepted is None else state.accepted
        known = known.expand(*known.shape[:-2], self.batch_size, -1)
        ends = ends.to(known.device)[:, None].expand(*known.shape[:-1], 1)
        positions = known.gather(-1, ends) + torch.arange(1, rows + 1, device=known.device)
        mask = next(iter(masks.values()))
        embeddings = self.drafter.mask_embedding.to(mask.device, self._dtype()).expand(self.batch_size, rows, -1)
        visible = {
            layer: even and kind.window is None for kind, layer in zip(tuning.kinds, tuning.layer_ids, strict=True)
        }
        seen = [visible.get(layer, False) for layer in range(max(tuning.layer_ids) + 1)]
        with scratch_forward(cache), armed(TreeAttention(rows, seen)):
            return tuning.draft(embeddings, positions, masks)[:, :size]

    def _paddings(self, state: DraftState, lengths: Sequence[int]) -> list[int]:
        """Columns of left padding in each row: at a call's first draft, what it holds beyond its positions."""
        if self._padding is None:
            counted = zip(lengths, state.positions.tolist(), strict=True)
            self._padding = [max(0, length - position) for length, position in counted]
        return self._padding

    def _masks(
        self, layers: dict[LayerKind, TreeLayer], size: int, rows: int, paddings: list[int] | None
    ) -> dict[LayerKind, torch.Tensor]:
        """What a group of `size` rows sees in each kind of layer; rows beyond it see what it does, but not it.

        Args:
            layers: A layer of each kind.
            size: Rows of the group.
            rows: Rows that pass the layers.
            paddings: Columns of left padding in each row of the batch; None = none, and all rows are equally long.
        """
        shared = next(iter(layers.values())).rows
        device = next(iter(layers.values())).keys.device
        if paddings is None and size == rows and all(kind.window is None for kind in layers):
            shape = (self.batch_size, 1, rows, shared.longest + rows)
            return dict.fromkeys(layers, torch.zeros(shape, dtype=self._dtype(), device=device))
        valid = None
        if paddings is not None and any(paddings):
            columns = torch.arange(max(paddings), device=device)
            valid = columns >= to_device(paddings, device)[:, None]
        group = (torch.arange(rows, device=device) < size).expand(self.batch_size, -1)
        seen = group[:, :, None] == group[:, None, :]
        slots = torch.arange(rows, device=device).expand(self.batch_size, -1)
        lengths = to_device(shared.lengths, device)
        masks = {}
        for kind, layer in layers.items():
            offset = layer.view_offset()
            columns_seen = (offset, shared.longest - offset)
            masks[kind] = tree_mask(kind, seen, slots, lengths, columns_seen, valid, self._dtype())
        return masks

    def _dtype(self) -> torch.dtype:
        target = self._target()
        assert target is not None
        dtype: torch.dtype = target.dtype
        return dtype
