"""Configuration of the TreeFlash drafter."""

from __future__ import annotations

from typing import Any

import torch

from ..dflash import DFlashConfig
from ..fields import COUNT, SHARE, check_fields
from .convert_treeflash import convert_config, is_published

APPROXIMATIONS = ("swiglu", "linear", None)
#: M where the configuration leaves it to the device, on a CPU and elsewhere.
CPU_PARENTS, PARENTS = 4, 16
HEADS = ("auto", "full", "candidates")
_KINDS = {"num_parents": COUNT.or_none(), "head_candidates": COUNT, "dead_end_discount": SHARE.or_none()}


class TreeFlashConfig(DFlashConfig):
    """What a TreeFlash drafter is: a DFlash drafter and the head that corrects it (arXiv 2606.03819).

    Args:
        ar_approximation: Kind of the correcting head, `"swiglu"` or `"linear"`; None = none, which is plain DFlash.
        num_parents: Parents M that a depth below the first is conditioned on: the M best tokens of the depth above.
            A child among the M of its own depth can be extended, another is a dead end. None = by the device the head
            computes on: 4 on a CPU, where every row costs, and else 16.
        head: Which logits of a corrected state are computed. `"full"`: of the whole vocabulary. `"candidates"`: of the
            `head_candidates` tokens that the uncorrected state ranks first, the only ones then drafted, and with an
            estimated normaliser (see `score_candidates`). `"auto"` = full for vocabularies of at most 512. Under a
            target whose head is no plain matrix (quantised, wrapped) it is always full.
        head_candidates: That number; at least `num_parents`.
        dead_end_discount: Above 0 and at most 1: a dead end goes on with the uncorrected distribution of the next
            depth, its probabilities times this; None = it ends. Chains always go on, so that they fill the block.
        kwargs: Fields of `DFlashConfig`.

    Raises:
        ValueError: A value contradicts another one.
    """

    model_type = "treespec_treeflash"

    def __init__(
        self,
        ar_approximation: str | None = "swiglu",
        num_parents: int | None = None,
        head: str = "auto",
        head_candidates: int = 64,
        dead_end_discount: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.ar_approximation = ar_approximation
        self.num_parents = num_parents
        self.head = head
        self.head_candidates = head_candidates
        self.dead_end_discount = dead_end_discount
        super().__init__(**kwargs)

    def _validate_fields(self) -> None:
        check_fields(vars(self), _KINDS)
        super()._validate_fields()
        if self.ar_approximation not in APPROXIMATIONS:
            raise ValueError(f"ar_approximation is {self.ar_approximation!r}; it is one of {list(APPROXIMATIONS)}.")
        if self.head not in HEADS:
            raise ValueError(f"head is {self.head!r}; it is one of {list(HEADS)}.")
        if self.head_candidates < (self.num_parents or PARENTS):
            raise ValueError(
                f"head_candidates ({self.head_candidates}) is below num_parents ({self.num_parents}); the parents are "
                "the first of the candidates."
            )

    def parents_on(self, device: torch.device) -> int:
        """M on a device."""
        return self.num_parents or (CPU_PARENTS if device.type == "cpu" else PARENTS)

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads `config.json`, in this package's format or in the published one."""
        config_dict, unused = super(DFlashConfig, cls).get_config_dict(*args, **kwargs)
        return (convert_config(config_dict) if is_published(config_dict) else config_dict), unused
