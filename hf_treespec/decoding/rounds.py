"""The decoding loop: propose, expand, choose, verify, walk, commit."""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.logits_process import SuppressTokensLogitsProcessor
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging

from ..attention import interface
from ..budget import ForwardKind, RoundRecord
from ..caches import TreeCache, grow_static
from ..compat import CACHE_KEYWORD
from ..configuration import TreeSpecConfig
from ..drafters.base import BlockDrafter, DraftState
from ..drafters.checks import check_length
from ..transfer import to_device
from ..trees import DraftTree
from . import contexts
from .budgets import lend_policy
from .candidate_generator import TreeCandidateGenerator
from .clock import RoundTimes, StageClock
from .features import FeatureRecorder
from .outputs import build_output
from .report import GenerationReport
from .rows import Rows
from .sampling import Picker
from .stopping import Stopping
from .support import check_positions, decoder_layers
from .verification import Verifier
from .walk import Walk

logger = logging.get_logger(__name__)

_UNRECORDED = "the target's decoder layers did not report their outputs (a compiled target does not)"
#: Drafts that may come out non-finite before a call stops drafting.
_MAX_NONFINITE = 3
#: Plain rounds whose features wait to enter the draft context together.
_MOST_PENDING = 32


@dataclass(frozen=True)
class _Committed:
    """What a round added to the target's cache, the session not yet told.

    Attributes:
        selected: Its rows of every feature layer, each `[B, T, H_target]`.
        first: Position of the first one of each row.
        counts: How many of them each row has; T is the most.
    """

    selected: list[torch.Tensor]
    first: list[int]
    counts: list[int]


@dataclass(frozen=True)
class _Outcome:
    """What a round came to, until the clock knows how long it took."""

    nodes: int
    drafted: bool
    live: list[int]
    leads: list[int]
    context: int
    paths: list[list[int]]
    cut: list[bool]
    promised: tuple[torch.Tensor, torch.Tensor] | None
    kind: ForwardKind
    trial: bool

    def record(self, times: RoundTimes, batch_size: int) -> RoundRecord:
        draft_ms = times.stages.get("propose", 0.0) + times.stages.get("expand", 0.0)
        verify_ms = times.stages.get("verify", 0.0)
        steps = [len(self.paths[row]) for row in self.live]
        promised: list[float] = []
        # A walk that a stopping rule cut short says nothing about the drafter.
        if self.promised is not None and not any(self.cut):
            scores, depths = self.promised
            promised = torch.bincount(depths.reshape(-1), weights=scores.reshape(-1)).tolist()
        came = list(zip(self.leads, steps, strict=True))
        # Nobody waits any longer for a row that has stopped.
        came = [row for row, over in zip(came, self.cut, strict=True) if not over] or came
        return RoundRecord(
            nodes=self.nodes,
            drafted=self.drafted,
            batch=batch_size,
            live=len(self.live),
            context=self.context,
            draft_ms=draft_ms,
            verify_ms=verify_ms,
            other_ms=max(0.0, times.total - draft_ms - verify_ms),
            tokens=sum(steps),
            progress=min(lead + taken for lead, taken in came) - min(lead for lead, _ in came),
            promised=promised,
            accepted=[sum(taken > depth for taken in steps) for depth in range(len(promised))],
            kind=self.kind,
            trial=self.trial,
        )


class TreeDecoding:
    """One `generate` call with a drafter.

    Attaches to the target and its cache when constructed, detaches in `close`, which every way out must call.

    Args:
        target: The model whose output must not change.
        drafter: The drafter.
        config: Decoding options.
        input_ids: Prompt, long `[B, L0]`.
        processors: The caller's logits processors.
        criteria: The caller's stopping criteria.
        generation_config: The prepared generation config.
        streamer: The caller's streamer, if any.
        model_kwargs: Keyword arguments for the target, the cache among them.

    Raises:
        UnsupportedCacheError: The cache cannot verify trees.
        ValueError: The request cannot be served.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: BlockDrafter,
        config: TreeSpecConfig,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.target, self.drafter, self.config = target, drafter, config
        self.generation_config, self.model_kwargs = generation_config, model_kwargs
        self.streamer = streamer
        self.batch_size = input_ids.shape[0]
        wants = generation_config if generation_config.return_dict_in_generate else None
        pad = getattr(generation_config, "_pad_token_tensor", None)
        self.rows = Rows(
            input_ids,
            Stopping(criteria),
            0 if pad is None else int(pad),
            streamer,
            keep_scores=bool(wants and wants.output_scores),
            keep_logits=bool(wants and wants.output_logits),
            keep_hidden=bool(wants and wants.output_hidden_states),
        )
        self.report = GenerationReport(row_committed=[(0, 0)] * self.batch_size)
        self.clock = StageClock(target.device)
        self.picker = Picker(bool(generation_config.do_sample), self.batch_size, input_ids.device)
        self.input_ids, self.processors = input_ids, processors
        self._resources = ExitStack()
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        target, config = self.target, self.config
        interface.install()  # kernels from the Hub register themselves when a model is loaded
        text_config = target.config.get_text_config()
        decoder_layers(target)
        max_length = self.rows.stopping.max_length
        check_length(self.drafter, max_length, config.draft_window)
        cache = self.model_kwargs[CACHE_KEYWORD]
        session = contexts.recall(cache, self.drafter, self.batch_size)
        self.session = session or self.drafter.start(target, self.batch_size, max_length)
        self.session.configure(config)
        self._resources.callback(self.session.close)
        self.policy = self._resources.enter_context(lend_policy(config, target, self.drafter, cache))
        rows = self.policy.limit * self.session.rows_per_node
        if self.generation_config.cache_implementation == "static" and cache.get_seq_length() == 0:
            cache = self.model_kwargs[CACHE_KEYWORD] = grow_static(cache, text_config, rows)
        columns = max_length - 1 + self._columns_before_prompt(cache)
        check_positions(text_config, columns + 1)
        self.cache = TreeCache.attach(cache, text_config, self.batch_size, columns + rows)
        self._resources.callback(self.cache.detach)
        self.recorder = FeatureRecorder(target, self.session)
        self._resources.callback(self.recorder.close)
        banned = [p.suppress_tokens for p in self.processors if type(p) is SuppressTokensLogitsProcessor]
        self.generator = TreeCandidateGenerator(
            self.session,
            config,
            self.drafter.drafted_depths,
            text_config.vocab_size,
            torch.cat([torch.as_tensor(tokens) for tokens in banned]) if banned else None,
            self.clock,
        )
        self.walk = Walk(self.rows, self.processors, self.picker, self.cache.requires_lockstep)
        if self.walk.lockstep:
            logger.info(
                "Rows advance in lockstep: a processor, criterion or cache of this call needs the whole batch."
            )
        self._pending: list[_Committed] = []
        #: Features of the prompt, their positions and which of them are real, until the session is told.
        self._prompt: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
        self._accepted: torch.Tensor | None = None
        self._extra_hidden: torch.Tensor | None = None
        self._drafting = True
        self._outcomes: deque[_Outcome] = deque()
        self._promised: tuple[torch.Tensor, torch.Tensor] | None = None
        self._why = ""

    def _columns_before_prompt(self, cache: Cache) -> int:
        """Cached columns that `input_ids` does not count: a past it goes on from, or a prompt given as embeddings."""
        embeds = self.model_kwargs.get("inputs_embeds")
        if embeds is not None and self.rows.prompt_length == 0:
            return int(embeds.shape[1])
        mask = self.model_kwargs.get("attention_mask")
        whole = getattr(self.generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
        return int(cache.get_seq_length()) if whole not in (-1, self.rows.prompt_length) else 0

    def run(self) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Generates until every row has stopped and returns what plain `generate` returns."""
        began = time.perf_counter()
        self._prefill()
        self.report.prefill_seconds = time.perf_counter() - began
        while self.rows.live():
            self._round()
        self.report.decode_seconds = time.perf_counter() - began - self.report.prefill_seconds
        return self._finish()

    def _prefill(self) -> None:
        with self.recorder.prefill():
            outputs = self.target._prefill(self.input_ids, self.generation_config, self.model_kwargs)
        self.cache.prefilled()
        self.report.target_forwards += 1
        columns = self.cache.lengths[0]
        valid = self.model_kwargs.get("attention_mask")
        if valid is not None:
            valid = valid.bool()[:, :columns]
            if bool(valid.all()):
                valid = None
        self.verifier = Verifier(
            self.target,
            self.model_kwargs,
            self.cache,
            self.recorder,
            valid,
            self.rows.hidden is not None,
            self.rows.stopping.max_length - self.rows.prompt_length,
        )
        self._note_prompt(columns, valid)
        self.policy.begin(columns, self.batch_size)
        root = DraftTree.root(self.input_ids.new_zeros(self.batch_size))
        self.walk(root, outputs.logits[:, -1:])
        if self.rows.hidden is not None:
            for row, kept in enumerate(self.rows.hidden):
                kept.append(tuple(layer[row : row + 1] for layer in outputs.hidden_states))
        self.rows.stream()

    def _note_prompt(self, columns: int, valid: torch.Tensor | None) -> None:
        """Positions of the prompt as the drafter counts them, and its features."""
        device = self.input_ids.device
        if valid is None:
            positions = torch.arange(columns, device=device).expand(self.batch_size, -1)
        else:
            positions = (valid.cumsum(1) - 1).clamp(min=0)
        self._first_position = [position + 1 for position in positions[:, -1].tolist()]
        features = self.recorder.prefill_features()
        if features is None:
            self._stop_drafting(_UNRECORDED)
            return
        fresh = features.shape[1]
        self._prompt = features, positions[:, -fresh:], None if valid is None else valid[:, -fresh:]

    def _round(self) -> None:
        """One round, from features and anchors to committed tokens, and what it teaches."""
        live, context = self.rows.live(), max(self.cache.lengths)
        leads = self._leads(live)
        with self.clock.round():
            tree = self._draft(live, leads)
            drafted = tree is not None
            if tree is None:
                tree = DraftTree.root(self._anchors())
            extra = self.session.extra_rows(tree) if drafted else None
            riding, trial = self.session.riding_rows, drafted and self.session.is_trial
            with self.clock.stage("verify"):
                logits, hidden = self.verifier(tree, self._steps(), extra, self.policy.split)
            with self.clock.stage("walk"):
                paths = self.walk(tree, logits, hidden)
            with self.clock.stage("commit"):
                self._commit(paths, drafted, len(tree) if extra is not None else None)
                self.rows.stream()
        cut = [self.rows.stopped(row) for row in live]
        self.report.record(paths, len(tree), live, cut, drafted, self._why, riding)
        self._outcomes.append(
            _Outcome(
                nodes=len(tree),
                drafted=drafted,
                live=live,
                leads=leads,
                context=context,
                paths=paths,
                cut=cut,
                promised=self._promised,
                kind=ForwardKind(bool(self.policy.split), riding > 0 or extra is not None),
                trial=trial,
            )
        )
        self._learn()

    def _learn(self) -> None:
        """Tells the policy of the rounds whose times are known by now.

        Several together where it has patience: what is learned from the first is in the processor's caches by then.
        """
        if len(self._outcomes) < self.policy.patience and self.rows.live():
            return
        records = [self._outcomes.popleft().record(times, self.batch_size) for times in self.clock.finished()]
        self.report.verify_ms_history += [record.verify_ms for record in records]
        self.policy.record_all(records)

    def _leads(self, live: list[int]) -> list[int]:
        """Tokens that each live row is ahead of the slowest."""
        done = [len(self.rows.tokens[row]) for row in live]
        least = min(done)
        return [tokens - least for tokens in done]

    def _draft(self, live: list[int], leads: list[int]) -> DraftTree | None:
        """The trees to verify, or None for a plain round, whose features the session still gets to see."""
        self._promised = None
        nodes, depth = self._limits()
        if nodes < 2 or depth < 1 or not self._drafting:
            self._why = "no room to draft" if self._drafting else "drafting has stopped"
        elif not self.policy.should_draft():
            self._why = self.policy.reason
        else:
            nodes = min(nodes, self.policy.largest())
            tree = self.generator.get_tree(self._state(depth, self.generator.width(nodes)), nodes)
            if tree is None:
                self._why = "draft not finite"
                self._count_nonfinite()
                return None
            with self.clock.stage("expand"):
                tree = tree.prefix(self._choose(tree, live, leads))
            self._why = self.policy.reason
            return tree
        self._wait()
        return None

    def _choose(self, tree: DraftTree, live: list[int], leads: list[int]) -> int:
        if not self.policy.learns:
            return self.policy.choose(tree.scores())
        scores, depths = tree.scores(), tree.depths
        if len(live) < self.batch_size:
            scores, depths = scores[live], depths[live]
        if scores.device.type != "cpu":
            # One read for both: depths are small numbers, which a float holds.
            packed = torch.stack([scores, depths.to(scores.dtype)]).cpu()
            scores, depths = packed[0], packed[1].long()
        chosen = self.policy.choose(scores, depths, leads, self.session.rides)
        self._promised = scores[:, :chosen], depths[:, :chosen]
        return chosen

    def _limits(self) -> tuple[int, int]:
        """Most nodes and depths this round can use."""
        nodes, depth = self.policy.limit, min(self.generator.depth, self.rows.wanted() - 1)
        free, flush = self.cache.free_rows(), self.cache.depth_limit()
        if free is not None:
            nodes = min(nodes, free // self.session.rows_per_node)
        if flush is not None:
            depth = min(depth, flush - 1)
        return nodes, depth

    def _steps(self) -> list[int]:
        return [len(tokens) - 1 for tokens in self.rows.tokens]

    def _anchors(self) -> torch.Tensor:
        return to_device([tokens[-1] for tokens in self.rows.tokens], self.input_ids.device)

    def _anchor_positions(self) -> torch.Tensor:
        positions = [first + step for first, step in zip(self._first_position, self._steps(), strict=True)]
        return to_device(positions, self.input_ids.device)

    def _state(self, depth: int, width: int) -> DraftState:
        features, positions, valid = self._take_pending()
        return DraftState(
            anchors=self._anchors(),
            positions=self._anchor_positions(),
            features=features,
            feature_positions=positions,
            feature_valid=valid,
            depth=depth,
            width=width,
            accepted=self._accepted,
            extra_hidden=self._extra_hidden,
        )

    def _take_pending(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Features, positions and validity of everything committed since the session was last told."""
        parts = [] if self._prompt is None else [self._prompt]
        if self._pending:
            features = self.recorder.fuse([part.selected for part in self._pending])
            parts.append((features, *self._places(self._pending)))
        self._prompt, self._pending = None, []
        if len(parts) < 2:
            return parts[0] if parts else (None, None, None)
        valid = None
        if any(part[2] is not None for part in parts):
            valid = torch.cat(
                [torch.ones_like(places, dtype=torch.bool) if real is None else real for _, places, real in parts], 1
            )
        return torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts], 1), valid

    def _places(self, pending: list[_Committed]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Positions `[B, T₁ + T₂ + …]` of what rounds committed, and which of them are real; None = all."""
        places: list[list[int]] = [[] for _ in range(self.batch_size)]
        real: list[list[bool]] = [[] for _ in range(self.batch_size)]
        for part in pending:
            longest = max(part.counts)
            for row, (first, count) in enumerate(zip(part.first, part.counts, strict=True)):
                places[row] += range(first, first + longest)
                real[row] += [True] * count + [False] * (longest - count)
        device = self.input_ids.device
        return to_device(places, device), None if all(map(all, real)) else to_device(real, device, torch.bool)

    def _wait(self) -> None:
        """Keeps a plain round's features for the next draft; the session takes them many at a time."""
        if len(self._pending) >= _MOST_PENDING:
            self._observe()

    def _observe(self) -> None:
        if self._drafting and (self._pending or self._prompt is not None):
            self.session.observe(self._state(0, 0))

    def _count_nonfinite(self) -> None:
        self.report.nonfinite_drafts += 1
        if self.report.nonfinite_drafts == 1:
            logger.warning(
                "The drafter produced non-finite values; the round is decoded plainly. Load the drafter in a dtype "
                f"that holds its activations (now {self.drafter.dtype})."
            )
        if self.report.nonfinite_drafts >= _MAX_NONFINITE:
            self._stop_drafting("the drafter's values are not finite")

    def _stop_drafting(self, reason: str) -> None:
        self._drafting, self._pending, self._prompt = False, [], None
        self.report.reason = reason
        logger.info(f"Going on without drafts: {reason}.")

    def _commit(self, paths: list[list[int]], drafted: bool, first_extra: int | None) -> None:
        """Keeps the paths in the cache and hands their features to the session."""
        anchors_at = [
            first + len(tokens) - 1 - len(path)
            for first, tokens, path in zip(self._first_position, self.rows.tokens, paths, strict=True)
        ]
        self.cache.commit(paths)
        if not self._drafting:
            return
        if not self.recorder.reported():
            self._stop_drafting(_UNRECORDED)
            return
        self._pending.append(_Committed(self.recorder.select(paths), anchors_at, [len(path) for path in paths]))
        ends = [path[-1] if path else 0 for path in paths]
        self._accepted = to_device(ends, self.input_ids.device) if drafted else None
        self._extra_hidden = None if first_extra is None else self.recorder.last_hidden(first_extra)

    def _finish(self) -> torch.Tensor | GenerateDecoderOnlyOutput:
        steps = self.rows.steps
        assert steps is not None
        self.picker.finish(steps)
        self.rows.stream()
        if self.streamer is not None:
            self.streamer.end()
        # A row that generated past the call's end, waiting for another to stop, is cut back to it.
        columns = self.cache.lengths[0] - (len(self.rows.tokens[0]) - 1) + steps - 1
        beyond = [max(0, length - columns) for length in self.cache.lengths]
        self.cache.trim(columns)
        cache = self.model_kwargs[CACHE_KEYWORD]
        returned = bool(self.generation_config.return_dict_in_generate)
        if returned or getattr(cache, "_is_user_defined", False):
            self._observe()
            if self._drafting:
                held = self.session.lengths
                self.session.rollback([seen - cut for seen, cut in zip(held, beyond, strict=True)])
                contexts.remember(cache, self.session, self.drafter, self.cache.lengths)
        self.report.tokens = sum(min(len(tokens), steps) for tokens in self.rows.tokens)
        self.report.cache_bytes_written = self.cache.bytes_written
        self.report.stage_seconds = self.clock.seconds()
        self._learn()
        self.report.budget = self.policy.summary()
        self._report_verdict()
        return build_output(self.rows, cache, returned)

    def _report_verdict(self) -> None:
        """Says that drafting does not pay: of every call in its report, of the first of several in a warning."""
        verdict = self.policy.verdict
        if verdict:
            self.report.reason = self.report.reason or verdict
            if not self.policy.warned:
                logger.warning(f"Drafting {verdict}; decoded plainly where it did not.")
        self.policy.warned = bool(verdict)

    def close(self) -> None:
        """Takes everything off the target and its cache again."""
        self._resources.close()
