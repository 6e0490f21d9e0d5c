"""One target forward over a whole draft tree."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention.interface import TreeAttention, armed
from ..attention.masks import TreeMasks
from ..caches import TreeCache
from ..compat import CACHE_KEYWORD
from ..drafters.base import ExtraRows
from ..transfer import to_device
from ..trees import DraftTree
from .features import FeatureRecorder

#: Keyword arguments that describe the prompt, not the rows of a verification forward.
_PROMPT_ONLY = ("attention_mask", "position_ids", "inputs_embeds", "token_type_ids")


class Verifier:
    """Runs the target over trees, with positions and masks by depth.

    Args:
        target: The model whose output must not change.
        model_kwargs: Keyword arguments of the call, after prefill.
        cache: The call's tree cache.
        recorder: Listens to the feature layers.
        valid: False where a column of the prompt is padding, bool `[B, S0]`; None if there is none.
        keep_hidden: Return hidden states of every node.
        new_tokens: Most tokens a row may generate.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        model_kwargs: dict[str, Any],
        cache: TreeCache,
        recorder: FeatureRecorder,
        valid: torch.Tensor | None,
        keep_hidden: bool,
        new_tokens: int,
    ) -> None:
        self._target = target
        self._cache = cache
        self._recorder = recorder
        self._keep_hidden = keep_hidden
        self._kwargs = {key: value for key, value in model_kwargs.items() if key not in _PROMPT_ONLY}
        self._token_types = {
            key: value for key, value in model_kwargs.items() if key.endswith("token_type_ids") and value is not None
        }
        self._next_position = model_kwargs["position_ids"][..., -1:] + 1
        self._last_position = self._next_position + max(0, new_tokens - 1)
        self._masks = TreeMasks.for_config(target.config.get_text_config(), target.dtype, target.device, valid)
        self._kinds = tuple(dict.fromkeys(self._masks.kinds))
        self._swap, self._least_swapped = self._expert_kernels()

    def __call__(
        self, tree: DraftTree, steps: list[int], extra: ExtraRows | None = None, split: bool | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        """Verifies a batch of trees.

        Args:
            tree: The trees, roots not yet in the cache.
            steps: Generation step of each row's root token.
            extra: Rows that ride along.
            split: Whether attention is computed in two parts; None = as is usual on the device.

        Returns:
            Logits `[B, N, V]` and, where kept, hidden states by layer, each `[B, N, H]`.
        """
        nodes, device = len(tree), self._target.device
        tokens, depths, seen = tree.tokens, tree.depths, tree.ancestors()
        if extra is not None:
            tokens, depths, seen = extra.extend(tokens, depths, seen)
        tokens, depths, seen = tokens.to(device), depths.to(device), seen.to(device)
        width = tokens.shape[1]
        first = self._next_position + (
            steps[0] if len(steps) == 1 else to_device(steps, self._next_position.device)[:, None]
        )
        positions = first + depths.to(first.device)
        if len(steps) > 1:
            # Depths follow the row that wants most; nodes past the own end of a row are never accepted.
            positions[..., :nodes] = torch.minimum(positions[..., :nodes], self._last_position)
        cache = self._cache
        views = {kind: cache.view(kind, width) for kind in self._kinds}
        masks = self._masks.build(seen, depths, cache.lengths, views)
        inputs = self._inputs(tokens, positions)
        inputs["attention_mask"] = masks
        with (
            cache.tree_forward(width),
            armed(TreeAttention(width, self._masks.prefix_visible, split)),
            self._recorder.verification(),
            self._expert_swap((width + self._recorder.riding_rows) * tokens.shape[0]),
        ):
            outputs = self._target(**inputs, return_dict=True)
        hidden = outputs.hidden_states if self._keep_hidden else None
        return outputs.logits[:, :nodes], hidden

    def _inputs(self, tokens: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        width = tokens.shape[1]
        # What follows a prompt is text: the kind of its last token goes on, multimodal kinds are 0.
        kinds = {
            key: (value[..., -1:] if key == "token_type_ids" else torch.zeros_like(value[..., -1:])).expand(-1, width)
            for key, value in self._token_types.items()
        }
        inputs = self._target.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=width,
            is_first_iteration=False,
            position_ids=positions,
            **(self._kwargs | kinds),
        )
        inputs[CACHE_KEYWORD] = self._kwargs[CACHE_KEYWORD]
        inputs["position_ids"] = positions
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        if self._keep_hidden:
            inputs["output_hidden_states"] = True
        return inputs

    def _expert_kernels(self) -> tuple[Callable[[], AbstractContextManager[Any]], int]:
        """The decode-time expert kernels of transformers, and the rows from which on they are not worth it.

        They copy experts' weights: for few rows only.
        """
        swap = getattr(self._target, "_optimize_model_for_decode", None)
        config = self._target.config.get_text_config()
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        if swap is None or not experts or self._target.device.type == "cpu":
            return nullcontext, 0
        return swap, -(-experts // (getattr(config, "num_experts_per_tok", None) or 1))

    def _expert_swap(self, rows: int) -> AbstractContextManager[Any]:
        return self._swap() if rows < self._least_swapped else nullcontext()
