"""The rules of numbers: what is scaled round the borrowed modules, and what a dtype holds."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from ..base import BlockDrafter
from . import probes
from .findings import Finding, Status, fits, own


def embeddings(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """The drafter is given embeddings as the target's own layers are.

    Measured, not read from names: some families scale inside their embedding, others behind it. Where the target
    changes more than a scale (a norm, learned positions), drafters are given the rows themselves.
    """
    rule = "embeddings"
    if own(drafter, "embed_tokens") is not None:
        yield fits(rule, "the drafter's own")
        return
    if target.get_input_embeddings() is None:
        return
    if target.get_input_embeddings().weight.is_meta:
        yield Finding(rule, Status.unchecked, "not checked without weights")
        return
    path = probes.embedding_path(drafter, target)
    if path is None:
        yield Finding(rule, Status.unchecked, "what the first layer is given could not be measured")
        return
    lost = probes.ratio(path.seen, path.given)
    scale = probes.ratio(path.given, path.rows)
    times = "" if scale is None or probes.is_one(scale) else f", × {scale:.4g}"
    if lost is not None and probes.is_one(lost):
        yield fits(rule, f"as the target's first layer is given them{times}")
    elif lost is None and scale is not None:
        yield fits(rule, f"the embedding's rows{times}, without what the target adds to them")
    else:
        seen = "something else" if lost is None else f"{lost:.4g} times that"
        yield Finding(
            rule,
            Status.slow,
            f"the drafter is given the embedding's rows{times}, the target's first layer {seen}",
            "drafters are trained with what the target is given",
            _correct(drafter, "input_embedding_scale")
            or f"{type(target).__name__} scales its embeddings in a way not known here; please report it.",
        )


def logits(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """Behind the head, drafts get the scale and the soft cap that the target's logits get. Measured."""
    rule = "logits"
    if own(drafter, "lm_head") is not None:
        yield fits(rule, "of the drafter's own head")
        return
    if target.get_output_embeddings() is None:
        return
    pair = probes.logits_behind_head(drafter, target)
    if pair is None:
        yield Finding(rule, Status.unchecked, "what comes behind the head could not be measured")
        return
    wanted, given = pair
    lost = probes.ratio(wanted, given)
    if lost is not None and probes.is_one(lost):
        yield fits(rule, "as the target's own")
        return
    found = "are capped or bent in a way not known here" if lost is None else f"are {lost:.4g} times the drafter's"
    yield Finding(
        rule,
        Status.slow,
        f"the target's logits {found}",
        "drafts are scored as the target scores",
        _correct(drafter, "output_multiplier", "final_logit_softcapping")
        or (
            "Please report it."
            if lost is None or lost <= 0
            else f"drafter.with_options(drafter_temperature={1 / lost:.4g}) makes up for it."
        ),
    )


def _correct(drafter: BlockDrafter, *fields: str) -> str:
    """What to do where the drafter's own configuration states the scale; empty where it does not."""
    stated = [name for name in fields if getattr(drafter.config, name, None) is not None]
    if not stated:
        return ""
    return f"Correct {' and '.join(stated)} in the drafter's config.json, unless it was trained so."


def finite(drafter: PreTrainedModel) -> Iterator[Finding]:
    """A drafter in float16 holds finite weights and drafts finite states; other dtypes have the range of float32.

    Looks at every weight, then at a block over random features of unit variance. Features far from that can overflow
    still, which a call notices as it drafts.
    """
    rule = "precision"
    if drafter.dtype != torch.float16:
        yield fits(rule, str(drafter.dtype).removeprefix("torch."))
        return
    if any(parameter.is_meta for parameter in drafter.parameters()):
        yield Finding(rule, Status.unchecked, "float16, not checked without weights")
        return
    weights = [name for name, parameter in drafter.named_parameters() if not bool(parameter.isfinite().all())]
    hidden = drafter.probe() if not weights and isinstance(drafter, BlockDrafter) else None
    if not weights and (hidden is None or bool(hidden.isfinite().all())):
        yield fits(rule, "float16, which holds its weights and a block over random features")
        return
    where = f"its weight {weights[0]}" if weights else "a block over random features"
    yield Finding(
        rule,
        Status.wrong,
        f"the drafter overflows in float16: {where} came out infinite or not a number",
        "nothing it drafts would be accepted",
        "Load it with dtype=torch.bfloat16 or torch.float32; the target may stay in float16.",
    )


def precision(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """The drafter's dtype holds its numbers; the target's may be another."""
    yield from finite(drafter)
