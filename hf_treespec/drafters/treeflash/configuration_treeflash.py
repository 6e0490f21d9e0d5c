"""Configuration of the TreeFlash drafter."""

from __future__ import annotations

from typing import Any

from ..dflash import DFlashConfig

HEADS = ("swiglu", "linear")


class TreeFlashConfig(DFlashConfig):
    """A DFlash drafter and a head that corrects each slot by the token before it (arXiv 2606.03819).

    Args:
        ar_approximation: `"swiglu"` as published, `"linear"` without its gate, or None for plain DFlash.
        num_parents: M, tokens of a depth whose children get distributions of their own; the others are leaves.
        num_candidates: C, tokens of a depth that conditional distributions are computed for, the slot's own best ones;
            None = the whole vocabulary. See `conditional_lattice` for what it costs.
        dead_end_discount: What the slot's own distribution is multiplied by below tokens beyond the best M; None
            leaves those tokens without children.
        **kwargs: Of `DFlashConfig`.

    Raises:
        ValueError: A value contradicts another one.
    """

    model_type = "treespec_treeflash"

    def __init__(
        self,
        ar_approximation: str | None = "swiglu",
        num_parents: int = 16,
        num_candidates: int | None = 64,
        dead_end_discount: float | None = None,
        **kwargs: Any,
    ) -> None:
        if ar_approximation is not None and ar_approximation not in HEADS:
            raise ValueError(f"ar_approximation is {ar_approximation!r}; it must be one of {[*HEADS, None]}.")
        if num_parents < 1:
            raise ValueError(f"num_parents is {num_parents}; a depth has at least one parent (>= 1).")
        if num_candidates is not None and num_candidates < num_parents:
            raise ValueError(f"num_candidates ({num_candidates}) must be at least num_parents ({num_parents}).")
        if dead_end_discount is not None and not 0 < dead_end_discount <= 1:
            raise ValueError(f"dead_end_discount is {dead_end_discount}; it must lie in (0, 1] or be None.")
        self.ar_approximation = ar_approximation
        self.num_parents, self.num_candidates = num_parents, num_candidates
        self.dead_end_discount = dead_end_discount
        super().__init__(**kwargs)

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads `config.json`, in this package's format or in the published one."""
        # The published format is DFlash's, which the parent class has converted by now, and one section more.
        config_dict, unused = super(DFlashConfig, cls).get_config_dict(*args, **kwargs)
        section = config_dict.get("treeflash_config")
        if section is None:
            return super().get_config_dict(*args, **kwargs)
        fields, unused = super().get_config_dict(*args, **kwargs)
        return {**fields, "model_type": cls.model_type, "ar_approximation": section.get("ar_approximation")}, unused
