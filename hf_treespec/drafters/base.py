"""What every drafter family provides: a stateless `BlockDrafter` and, for one `generate` call, a `DraftSession`."""

from __future__ import annotations

import copy
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from ..configuration import TreeSpecConfig
from ..trees import DraftLattice, DraftTree


@dataclass(frozen=True)
class ExtraRows:
    """Rows that ride in the verification forward behind the tree, for drafters that draft inside the target.

    Attributes:
        tokens: Input token of each, long `[B, R]`.
        depths: Its distance from the anchor in positions, long `[B, R]`.
        nodes: Tree node whose view each row shares, long `[B, R]`.
        groups: Rows of one group see each other both ways, long `[B, R]`.
    """

    tokens: torch.Tensor
    depths: torch.Tensor
    nodes: torch.Tensor
    groups: torch.Tensor

    def extend(
        self, tokens: torch.Tensor, depths: torch.Tensor, seen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Puts the rows behind a tree's `[B, N]` tokens and depths and its `[B, N, N]` relation of who sees whom."""
        batch, nodes = tokens.shape
        rows = self.tokens.shape[1]
        wide = seen.new_zeros(batch, nodes + rows, nodes + rows)
        wide[:, :nodes, :nodes] = seen
        wide[:, nodes:, :nodes] = seen.gather(1, self.nodes[..., None].expand(-1, -1, nodes))
        wide[:, nodes:, nodes:] = self.groups[:, :, None] == self.groups[:, None, :]
        return torch.cat([tokens, self.tokens], 1), torch.cat([depths, self.depths], 1), wide


@dataclass(frozen=True)
class DraftState:
    """What a session is told when it is asked for the next lattice.

    Attributes:
        anchors: Last committed token of each row, long `[B]`.
        positions: Position of each anchor, long `[B]`.
        features: Fused target features of positions committed since the last call, `[B, T, H]` (see
            `DraftSession.fuse`), or None where there are none.
        feature_positions: Their positions, long `[B, T]`.
        feature_valid: Which of them are real, bool `[B, T]`; None = all.
        depth: Depths wanted, at most the drafter's own.
        width: Children a parent may need, at most the vocabulary.
        accepted: Verified node each row's last walk ended on, long `[B]`; None before the first, and after a round
            that was not drafted.
        extra_hidden: Last decoder layer's output for the extra rows of the last verification forward, `[B, R, H]`,
            or None.
    """

    anchors: torch.Tensor
    positions: torch.Tensor
    features: torch.Tensor | None
    feature_positions: torch.Tensor | None
    feature_valid: torch.Tensor | None
    depth: int
    width: int
    accepted: torch.Tensor | None = None
    extra_hidden: torch.Tensor | None = None


class TargetModules:
    """The target's input embedding and LM head, as a drafter borrows them.

    Casts at both boundaries, so that a drafter may run in another dtype than its target, and applies what the family
    does outside those two modules: an embedding multiplier going in, logit scaling and soft-capping coming out. A norm
    inside the embedding is left out, as drafters are trained on its rows (transformers' DFlash loop does the same).
    Holds them weakly: a draft context that waits for its conversation to go on keeps no target alive.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        config = target.config.get_text_config()
        embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
        self._embedding, self._lm_head = weakref.ref(embedding), weakref.ref(lm_head)
        self.vocab_size: int = config.vocab_size
        self._embedding_device = _weight(embedding).device
        head = _weight(lm_head)
        self._head_device = head.device
        self._head_dtype = head.dtype if head.is_floating_point() else None
        self._embedding_multiplier = float(getattr(config, "embedding_multiplier", None) or 1.0)
        scaling = float(getattr(config, "logits_scaling", None) or 1.0)
        # Granite and its kin divide by it, HyperCLOVA X multiplies.
        self._logits_divisor = 1 / scaling if config.model_type == "hyperclovax" else scaling
        self._logits_multiplier = float(getattr(config, "output_multiplier", None) or 1.0)
        # Cohere's models multiply by an attribute of theirs. Others have the field, which they do not apply, or a
        # learned scale of that name for something else.
        scale = getattr(target, "logit_scale", None)
        self._logits_multiplier *= scale if isinstance(scale, (int, float)) else 1.0
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)

    def embed(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Embeds long `[...]` token ids as the target does, its embedding's norm aside, cast to `dtype`."""
        embedding, token_ids = _alive(self._embedding), token_ids.to(self._embedding_device)
        embedded: torch.Tensor
        if isinstance(embedding, nn.Embedding) and hasattr(embedding, "embed_norm"):
            embedded = nn.Embedding.forward(embedding, token_ids)
        else:
            embedded = embedding(token_ids)
        return (embedded * self._embedding_multiplier if self._embedding_multiplier != 1.0 else embedded).to(dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits `[..., V]` of final hidden states `[..., H]`."""
        hidden = hidden.to(self._head_device, self._head_dtype or hidden.dtype)
        logits: torch.Tensor = _alive(self._lm_head)(hidden)
        return self.scaled(logits.float()[..., : self.vocab_size])

    def tokens(self, columns: torch.Tensor) -> torch.Tensor:
        """Token ids of columns of `logits`, long `[...]`: the same, as the target's head has a column a token."""
        return columns

    def columns(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of `logits` of token ids, long `[...]`, and whether they have one (bool); 0 where not."""
        return tokens, torch.ones_like(tokens, dtype=torch.bool)

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's logits `[..., V]` of the tokens that `logits` has columns of, in their order: all."""
        return logits

    def spread(self, values: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Values of the columns of `logits` at their tokens, `[..., vocab_size]`; 0 for tokens that have none."""
        return values

    @property
    def selects(self) -> bool:
        """Whether `logits_of` works: the head is a plain matrix, with nothing wrapped round it."""
        head = _alive(self._lm_head)
        if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:  # quantised, sharded
            return False
        return head.weight.is_floating_point() and not hasattr(head, "_hf_hook")

    def logits_of(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits `[..., M, C]` of chosen tokens, long `[..., C]`, for states `[..., M, H]`; see `selects`."""
        head = _alive(self._lm_head)
        assert isinstance(head, nn.Linear)
        tokens = tokens.to(self._head_device)
        logits = hidden.to(head.weight) @ head.weight[tokens].mT
        if head.bias is not None:
            logits = logits + head.bias[tokens].unsqueeze(-2)
        return self.scaled(logits.float())

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[..., C]` as the family scales and caps what comes out of its head."""
        if self._logits_divisor != 1.0:
            logits = logits / self._logits_divisor
        if self._logits_multiplier != 1.0:
            logits = logits * self._logits_multiplier
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits


def _alive(module: weakref.ref[nn.Module]) -> nn.Module:
    found = module()
    if found is None:
        raise RuntimeError("the target whose embeddings a drafter borrows is gone; start a new session.")
    return found


def _weight(module: nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


class DraftSession(ABC):
    """Everything one `generate` call keeps for its drafter."""

    #: Decoder layers of the target whose outputs are features, 0-based, in the order of `fuse`.
    feature_layers: tuple[int, ...] = ()
    #: Rows that one verified node takes up in the target at most, itself and those it brings along.
    rows_per_node: int = 1
    #: Temperature of the lattice's distributions.
    temperature: float = 1.0
    #: Most recent context positions drafting may attend to; None = the drafter's own default.
    window: int | None = None

    def configure(self, config: TreeSpecConfig) -> None:
        """Takes the options of the call that is about to draft."""
        self.temperature, self.window = config.drafter_temperature, config.draft_window

    @abstractmethod
    def fuse(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Contribution of the `index`-th feature layer to the fused feature.

        Summed over all feature layers this is the feature itself, so that the recorder keeps one `[B, T, H]` buffer
        instead of one a layer.

        Args:
            hidden: Output of decoder layer `feature_layers[index]`, `[B, T, H_target]`.
        """

    @abstractmethod
    def propose(self, state: DraftState) -> DraftLattice:
        """Takes the new features into the context and drafts one block. One draft forward."""

    @abstractmethod
    def observe(self, state: DraftState) -> None:
        """Takes the new features into the context without drafting (plain rounds, the end of a call)."""

    @property
    def rides(self) -> bool:
        """Whether nodes bring rows of the session's own along in drafted rounds that are no trials."""
        return self.rows_per_node > 1

    @property
    def is_trial(self) -> bool:
        """Whether the round under way tries a way of drafting that the session may not go on with."""
        return False

    def extra_rows(self, tree: DraftTree) -> ExtraRows | None:
        """Rows that ride in the verification forward of `tree`; None for drafters that have none.

        Called right before that forward. Rows that enter a deeper layer, by hooks of the session's own, are none of
        the forward's: a session prepares them here and returns None.
        """
        return None

    @property
    def riding_rows(self) -> int:
        """Rows of each sequence that the session itself brings into deeper layers of the coming forward."""
        return 0

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """Context positions held for each row."""

    @abstractmethod
    def rollback(self, lengths: Sequence[int]) -> None:
        """Forgets the context beyond `lengths` positions of each row."""

    def close(self) -> None:
        """Releases whatever the session attached; called on every way out of a call."""


class BlockDrafter(PreTrainedModel):
    """A small model that proposes a block of tokens in one forward. Holds weights only, no target and no state."""

    base_model_prefix = "model"
    _supports_sdpa = True

    #: What a pair is held to when this drafter is attached; see `hf_treespec.drafters.checks`.
    rules: ClassVar[Sequence[Callable[..., Any]]] = ()
    #: What a drafter does with the layers that its configuration names, in a model card's words.
    use_of_layers: ClassVar[str] = "reads the outputs of"
    #: Options used when a call gives none of its own.
    treespec_config: TreeSpecConfig | None = None
    #: Report of the last `generate` call this drafter took part in.
    last_report: Any = None
    #: What `push_to_hub` does. The package sets it: publishing stands above the drafters.
    publisher: ClassVar[Callable[..., Any]]

    @property
    def drafted_depths(self) -> int:
        """Depths D that one draft forward covers."""
        return self.config.block_size - 1

    @property
    def riding_load(self) -> float:
        """What the rows cost that ride behind a verified node, in rows that pass the whole target; a first guess."""
        return 0.0

    @property
    def backbone(self) -> BlockDrafter:
        """The drafter that this one refines; itself where there is none."""
        return self

    @property
    def weights(self) -> nn.Module:
        """What all views of this drafter (`with_options`) have in common, and no other drafter has."""
        return next(self.children(), self)

    @classmethod
    def refusal(cls, config: dict[str, Any]) -> str | None:
        """Why a checkpoint that looks like one of this family is none, for the error; None = nothing to say."""
        return None

    def borrow(self, target: PreTrainedModel) -> TargetModules:
        """The embedding and the head to draft with: the target's."""
        return TargetModules(target)

    def with_options(self, **options: Any) -> Self:
        """A light view of this drafter with other decoding options (see `TreeSpecConfig`); shares all weights."""
        view = copy.copy(self)
        view.treespec_config = (self.treespec_config or TreeSpecConfig()).with_options(**options)
        view.last_report = None
        return view

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Publishes this drafter on the Hub, once everything has been checked.

        Args:
            repo_id: `owner/name`.
            options: `measurement`, `target`, `license`, `private`, `token`, `commit_message` and more: those of
                `hf_treespec.hub.publish`.

        Raises:
            PermissionError: There is no token, or it may not write there.
            ValueError: Something must not be published; the message names the rule, the value and the fix.
        """
        return self.publisher(repo_id, **options)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Saves weights and configuration; see `PreTrainedModel.save_pretrained`.

        Raises:
            ValueError: `push_to_hub` is set, which would publish without a check.
        """
        if push_to_hub:
            raise ValueError(
                "save_pretrained(push_to_hub=True) would publish this drafter unchecked. Save it, and publish it with "
                "drafter.push_to_hub(repo_id, measurement=...)."
            )
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)

    def check_target(self, target: PreTrainedModel) -> None:
        """Checks that this drafter can draft for `target`, by its family's `rules`; warns where it may be slow.

        Raises:
            ValueError: It cannot; the message names the rule, the value and the fix.
        """
        from .checks import check

        check(self, target)

    def probe(self) -> torch.Tensor | None:
        """Hidden states of one block over random features, to see whether they are finite; None = not offered."""
        return None

    def start(self, target: PreTrainedModel, batch_size: int, max_length: int) -> DraftSession:
        """Opens a session for one `generate` call of `batch_size` rows of at most `max_length` positions."""
        raise NotImplementedError


def check_unwrapped(model: Any) -> None:
    """Checks that a model is no wrapper with a drafter inside, such as PEFT's.

    Raises:
        TypeError: It is one.
    """
    if isinstance(model, BlockDrafter) or not isinstance(model, nn.Module):
        return
    inner = next((module for module in model.modules() if isinstance(module, BlockDrafter)), None)
    if inner is not None:
        raise TypeError(
            f"A drafter is taken as it is, and this is a {type(model).__name__} around a {type(inner).__name__}. Give "
            "what is inside; where that is an adapter of PEFT, what `merge_and_unload()` returns."
        )
