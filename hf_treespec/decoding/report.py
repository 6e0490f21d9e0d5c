"""What happened in one `generate` call, measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .clock import STAGES


@dataclass
class GenerationReport:
    """Counts and times of one call.

    Attributes:
        rounds: Rounds after the prefill.
        plain_rounds: Rounds that drafted nothing.
        target_forwards: Forwards of the target, prefill included.
        tokens: Tokens generated over all rows, the prefill's included.
        pairs: (row, drafted round) pairs.
        committed: Tokens committed in them, after truncation.
        whole_pairs: Pairs whose walk no stopping rule cut short.
        whole_committed: Tokens committed in those.
        nodes: Rows verified in drafted rounds, roots included, over all live rows.
        riding_rows: Rows that a drafter's session brought along in their verifications, likewise over all live rows.
        accepted_by_depth: Walks that reached each depth in drafted rounds; index 0 counts the roots.
        row_committed: Tokens committed and pairs for each row.
        nonfinite_drafts: Rounds whose draft was not finite and went on as plain rounds.
        cache_bytes_written: Bytes the rounds wrote to the target's cache.
        prefill_seconds: Time up to the first token.
        decode_seconds: Time after it.
        stage_seconds: Time by stage of the rounds.
        nodes_history: Rows verified for each batch row, N, in each round.
        verify_ms_history: Milliseconds of each round's target forward.
        reasons: Rounds by the reason for their N.
        budget: What the budget policy knew at the end: `summary()` of the policy.
        reason: Why decoding was plain, where it was.
    """

    rounds: int = 0
    plain_rounds: int = 0
    target_forwards: int = 0
    tokens: int = 0
    pairs: int = 0
    committed: int = 0
    whole_pairs: int = 0
    whole_committed: int = 0
    nodes: int = 0
    riding_rows: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    row_committed: list[tuple[int, int]] = field(default_factory=list)
    nonfinite_drafts: int = 0
    cache_bytes_written: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    nodes_history: list[int] = field(default_factory=list)
    verify_ms_history: list[float] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    budget: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None

    def record(
        self,
        paths: list[list[int]],
        nodes: int,
        live: list[int],
        cut: list[bool],
        drafted: bool,
        why: str,
        riding_rows: int = 0,
    ) -> None:
        """Counts one round.

        Args:
            paths: Nodes each row's walk visited.
            nodes: Rows verified for each batch row.
            live: Rows that were generating.
            cut: Whether a stopping rule ended each of those rows' walks.
            drafted: Whether there was a draft.
            why: Why the round had that many rows, in the policy's words.
            riding_rows: Rows that rode with those of each batch row.
        """
        self.rounds += 1
        self.target_forwards += 1
        self.nodes_history.append(nodes)
        self.reasons[why] = self.reasons.get(why, 0) + 1
        if not drafted:
            self.plain_rounds += 1
            return
        for row, was_cut in zip(live, cut, strict=True):
            steps = len(paths[row])
            self.pairs += 1
            self.committed += steps
            self.nodes += nodes
            self.riding_rows += riding_rows
            tokens, pairs = self.row_committed[row]
            self.row_committed[row] = (tokens + steps, pairs + 1)
            if not was_cut:
                self.whole_pairs += 1
                self.whole_committed += steps
            self.accepted_by_depth.extend([0] * (steps - len(self.accepted_by_depth)))
            for depth in range(steps):
                self.accepted_by_depth[depth] += 1

    @property
    def drafted_rounds(self) -> int:
        return self.rounds - self.plain_rounds

    @property
    def acceptance_length(self) -> float:
        """τ: tokens committed, after truncation, by (row, drafted round) pair."""
        return self.committed / self.pairs if self.pairs else 0.0

    @property
    def tau_untruncated(self) -> float:
        """τ over the pairs that no stopping rule cut short."""
        return self.whole_committed / self.whole_pairs if self.whole_pairs else 0.0

    @property
    def tau_per_response(self) -> float:
        """Mean over rows of each row's own τ."""
        ratios = [tokens / pairs for tokens, pairs in self.row_committed if pairs]
        return sum(ratios) / len(ratios) if ratios else 0.0

    @property
    def tokens_per_forward(self) -> float:
        """Tokens by target forward and row, all forwards counted."""
        return self.tokens / (self.target_forwards * max(1, len(self.row_committed))) if self.target_forwards else 0.0

    @property
    def mean_nodes(self) -> float:
        """Rows verified in a drafted round, the root included."""
        return self.nodes / self.pairs if self.pairs else 0.0

    @property
    def mean_rows(self) -> float:
        """Rows of a drafted round's verification: nodes, and rows that rode with them."""
        return (self.nodes + self.riding_rows) / self.pairs if self.pairs else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of drafted walks that reached each depth, depth 1 first."""
        return [count / self.pairs for count in self.accepted_by_depth[1:]] if self.pairs else []

    @property
    def stage_ms(self) -> dict[str, float]:
        """Mean milliseconds a round spends in each stage; `other` is the rest of the round."""
        if not self.rounds:
            return {}
        stages = {name: 1e3 * self.stage_seconds.get(name, 0.0) / self.rounds for name in STAGES}
        stages["other"] = max(0.0, 1e3 * self.decode_seconds / self.rounds - sum(stages.values()))
        return stages

    def to_dict(self) -> dict[str, Any]:
        """All counts and derived figures, JSON-serialisable."""
        derived = (
            "drafted_rounds",
            "acceptance_length",
            "tau_untruncated",
            "tau_per_response",
            "tokens_per_forward",
            "mean_nodes",
            "mean_rows",
            "acceptance_by_depth",
            "stage_ms",
        )
        return asdict(self) | {name: getattr(self, name) for name in derived}

    def __str__(self) -> str:
        if self.reason and not self.target_forwards:
            return f"plain decoding: {self.reason}"
        rounds = f"{self.drafted_rounds} drafted and {self.plain_rounds} plain rounds"
        others = f"uncut {self.tau_untruncated:.2f}, per response {self.tau_per_response:.2f}"
        rows = f", {self.mean_rows:.1f} rows" if self.riding_rows else ""
        lines = [
            f"{self.tokens} tokens in {self.target_forwards} forwards ({self.tokens_per_forward:.2f} each), {rounds}",
            f"acceptance length {self.acceptance_length:.2f} ({others}), {self.mean_nodes:.1f} nodes{rows} a round",
        ]
        if self.rounds:
            lines.append("ms a round: " + ", ".join(f"{name} {ms:.2f}" for name, ms in self.stage_ms.items()))
        if self.acceptance_by_depth:
            lines.append("reached depth: " + ", ".join(f"{share:.0%}" for share in self.acceptance_by_depth))
        if self.nonfinite_drafts:
            lines.append(f"{self.nonfinite_drafts} drafts were not finite")
        if self.reason:
            lines.append(f"plain decoding: {self.reason}")
        return "\n".join(lines)
