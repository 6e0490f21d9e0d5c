"""Every decoding option in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

#: Rows of a round at most: its mask has the square of them.
MOST_ROWS = 4096
POLICIES = ("auto", "static", "ema", "bastion")
SHAPES = ("auto", "tree", "chain")


@dataclass(frozen=True)
class TreeSpecConfig:
    """Options of tree-speculative decoding.

    `GenerationConfig(treespec=…)` goes before the drafter's own `treespec_config`, with all its options where it is a
    config and with those it names where it is a dict. Nothing here changes which tokens come out, only how fast they
    do.

    A generation config is printed and saved with these options. Read back it holds them as a dict, which is as good.

    Attributes:
        budget: Rows verified in a round, the root included. `"auto"` takes what pays most on this machine, measured
            while decoding; a number from 1 to 4096 is taken always (1 is plain decoding). `"static"`, `"ema"` and
            `"bastion"` are policies to compare with (see `hf_treespec.budget`).
        max_budget: Most rows that the policies may choose; None = 64 on a CPU and 128 elsewhere.
        shape: `"tree"` verifies the best-first tree, `"chain"` only the drafter's single best continuation. `"auto"`
            is the tree, of which a chain is what remains where branches do not pay.
        depth: Most depths to draft; None = all the drafter has. `num_assistant_tokens` of a generation config means
            the same.
        drafter_temperature: Temperature of the drafter's own distributions; above 0. It moves acceptance only.
        draft_window: Most recent context positions the drafter attends to; None = the drafter's own default.
        on_unsupported: What to do with a request that cannot be served: `"raise"` a named error before prefill, or
            decode it the `"plain"` way with one warning.
    """

    budget: int | Literal["auto", "static", "ema", "bastion"] = "auto"
    max_budget: int | None = None
    shape: Literal["auto", "tree", "chain"] = "auto"
    depth: int | None = None
    drafter_temperature: float = 1.0
    draft_window: int | None = None
    on_unsupported: Literal["raise", "plain"] = "raise"

    def __post_init__(self) -> None:
        if not _is_count(self.budget) and self.budget not in POLICIES:
            raise ValueError(
                "`budget` must be 'auto', another policy ('static', 'ema', 'bastion') or an integer >= 1, the rows "
                f"verified with the root; got {self.budget!r}."
            )
        for name in ("max_budget", "depth", "draft_window"):
            check_count(name, getattr(self, name))
        for name in ("budget", "max_budget"):
            rows = getattr(self, name)
            if isinstance(rows, int) and rows > MOST_ROWS:
                raise ValueError(f"`{name}` is {rows:,}, but a round verifies at most {MOST_ROWS:,} rows.")
        if self.shape not in SHAPES:
            raise ValueError(f"`shape` must be 'auto', 'tree' or 'chain', got {self.shape!r}.")
        if not isinstance(self.drafter_temperature, int | float) or not self.drafter_temperature > 0:
            raise ValueError(f"`drafter_temperature` must be a number above 0, got {self.drafter_temperature!r}.")
        if self.on_unsupported not in ("raise", "plain"):
            raise ValueError(f"`on_unsupported` must be 'raise' or 'plain', got {self.on_unsupported!r}.")

    def with_options(self, **options: Any) -> TreeSpecConfig:
        """A copy with some options replaced.

        Raises:
            TypeError: An option does not exist.
        """
        known = {field.name for field in fields(self)}
        unknown = sorted(options.keys() - known)
        if unknown:
            raise TypeError(f"Unknown option(s) {', '.join(unknown)}; the options are {', '.join(sorted(known))}.")
        return replace(self, **options)

    def to_dict(self) -> dict[str, Any]:
        """Every option, JSON-serialisable; a `GenerationConfig` prints and saves it."""
        return asdict(self)

    def overlaid(self, value: TreeSpecConfig | Mapping[str, Any]) -> TreeSpecConfig:
        """These options with others over them: all those of a config, or those that a dict names.

        Raises:
            TypeError: It is neither, or names an option that these do not have.
            ValueError: An option has a value that it cannot have.
        """
        if isinstance(value, TreeSpecConfig):
            return self.with_options(**{field.name: getattr(value, field.name) for field in fields(value)})
        if isinstance(value, Mapping):
            return self.with_options(**value)
        raise TypeError(f"`treespec` takes a TreeSpecConfig or a dict of its options, got {type(value).__name__}.")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_count(name: str, value: object) -> None:
    """Checks an option that is a number of things, or None.

    Raises:
        ValueError: It is no integer of at least 1.
    """
    if value is not None and not _is_count(value):
        raise ValueError(f"`{name}` must be None or an integer of at least 1, got {value!r}.")
