"""The rules of tokens: one vocabulary, and a mask in it."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..base import BlockDrafter
from .architecture import equal
from .findings import Finding, Status, fits, own, text_config

#: Vocabularies that differ by at most this share are taken for one tokenizer's, padded or extended differently.
_RESIZED = 0.02
#: Tokens that vocabularies keep in reserve, whether or not their tokenizer calls them special.
_PLACEHOLDER = re.compile(r"[<\[].*(mask|unused|reserved)", re.IGNORECASE)
#: A row of an embedding this much smaller than its neighbours' has never been trained.
_UNTRAINED = 1e-3


def vocabulary(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """Both speak of the same tokens, as far as sizes tell."""
    found, wanted = text_config(target).vocab_size, drafter.config.vocab_size
    if wanted is None or found == wanted:
        yield fits("vocabulary", f"{found:,} tokens")
    elif abs(found - wanted) <= _RESIZED * min(found, wanted):
        yield Finding(
            "vocabulary",
            Status.slow,
            f"the target's vocabulary size is {found}, the drafter's vocab_size is {wanted}",
            "they are equal unless the target's embedding was resized",
            "Nothing to do if it was; else use the target this drafter was trained for.",
        )
    else:
        yield equal("vocabulary", found, wanted, "vocabulary size", "vocab_size")


def draft_vocabulary(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """The columns of a head of a reduced vocabulary stand for tokens of the target, each for one of its own."""
    rule, ids = "draft vocabulary", getattr(drafter, "target_ids", None)
    if ids is None or ids.is_meta:
        return
    size, tokens = text_config(target).vocab_size, ids.tolist()
    outside = sorted({token for token in tokens if not 0 <= token < size})
    if outside or len(set(tokens)) < len(tokens):
        what = f"tokens such as {outside[0]}" if outside else "a token twice"
        yield Finding(
            rule,
            Status.wrong,
            f"d2t maps columns of the drafter's head to {what}",
            f"the token of column i is i + d2t[i], and these are distinct tokens of the target, from 0 to {size - 1}",
            "Correct d2t, or use the target this drafter was trained for.",
        )
    else:
        yield fits(rule, f"{len(tokens):,} tokens")


def special_tokens(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """Begin and end of a text are the same tokens, as they are with the same tokenizer."""
    rule, differing = "special tokens", []
    for name in ("bos_token_id", "eos_token_id"):
        own, theirs = _ids(drafter.config, name), _ids(text_config(target), name)
        theirs |= _ids(target.config, name) | _ids(getattr(target, "generation_config", None), name)
        if own and theirs and not own & theirs:
            differing.append(f"{name} {sorted(theirs)} in the target, {sorted(own)} in the drafter")
    if differing:
        yield Finding(
            rule,
            Status.slow,
            ", ".join(differing),
            "one tokenizer has one of each",
            "If the target has another tokenizer than the one this drafter was trained with, use another drafter.",
        )
    else:
        yield fits(rule, "no contradiction")


def _ids(config: Any, name: str) -> set[int]:
    value = getattr(config, name, None)
    return set() if value is None else set(value) if isinstance(value, (list, tuple, set)) else {int(value)}


def mask_token(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """The token that fills undrafted rows is a row of the target's embedding, and has no other use."""
    rule, mask, text = "mask token", drafter.config.mask_token_id, text_config(target)
    own_embedding = own(drafter, "embed_tokens")
    embedding = own_embedding or target.get_input_embeddings()
    if embedding is None:
        return
    rows = embedding.weight.shape[0]
    if not 0 <= mask < rows:
        whose = "target" if own_embedding is None else "drafter"
        yield Finding(
            rule,
            Status.wrong,
            f"mask_token_id {mask} is no row of the {whose}'s embedding, which has {rows}",
            "the drafter fills its block with that row",
            f"Correct mask_token_id in the drafter's config.json or resize the {whose}'s embedding.",
        )
        return
    uses = [
        name.removesuffix("_token_id")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id")
        if mask in _ids(text, name) | _ids(target.config, name) | _ids(drafter.config, name)
    ]
    if uses:
        yield Finding(
            rule,
            Status.slow,
            f"mask_token_id {mask} is the {' and '.join(uses)} token too",
            "drafters are trained with a token of their own",
            "Correct mask_token_id in the drafter's config.json, unless it was trained with this one.",
        )
    if embedding.weight.is_meta:
        yield Finding(rule, Status.unchecked, f"{mask}; its row not checked without weights")
        return
    # The last row stands for the unused tail of a padded vocabulary, from which published masks are taken on purpose.
    others = torch.linspace(0, min(rows, text.vocab_size) - 1, 17, dtype=torch.long)
    probe = torch.cat([torch.tensor([mask]), others]).to(embedding.weight.device)
    with torch.no_grad():
        norm, *norms = embedding(probe).float().norm(dim=-1).tolist()
    usual, last = statistics.median(norms), norms[-1]
    if not math.isfinite(norm):
        yield Finding(
            rule,
            Status.wrong,
            f"the embedding of mask_token_id {mask} is not finite",
            "every row of a block would be",
            "Check the target's weights.",
        )
    elif norm < _UNTRAINED * usual < last:
        yield Finding(
            rule,
            Status.slow,
            f"the embedding of mask_token_id {mask} has norm {norm:.2g} where others have {usual:.2g}",
            "a row that was never trained is as a rule not the one the drafter was trained with",
            "Correct mask_token_id in the drafter's config.json.",
        )
    elif not uses:
        yield fits(rule, f"{mask}, of norm {norm:.2g} where others have {usual:.2g}")


def mask_in_tokenizer(mask: int, tokenizer: PreTrainedTokenizerBase) -> Finding:
    """The mask token is none that a text is made of: a special token, a placeholder, or a row beyond the tokenizer."""
    rule = "mask and tokenizer"
    token = tokenizer.convert_ids_to_tokens(mask) if mask < len(tokenizer) else None
    if token is None:
        return fits(rule, f"{mask} is no token of the tokenizer's {len(tokenizer):,}")
    if mask in tokenizer.all_special_ids or _PLACEHOLDER.match(token):
        return fits(rule, f"{mask} is {token}")
    return Finding(
        rule,
        Status.slow,
        f"mask_token_id {mask} is {token!r} in the target's tokenizer, a token of ordinary text",
        "drafters are trained with a token that no text has",
        "Correct mask_token_id in the drafter's config.json, unless it was trained with this one.",
    )
