"""Measures arms against each other: one process, equal work, interleaved, paired over prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.base import BlockDrafter
from .arms import Arm, Pair, build_arms, parse_arms
from .collected_warnings import CollectedWarnings
from .encoding import Inputs, encode_turns, pad_left
from .measurement import ArmResult, repeated_ngrams
from .prompt_sets import HubSet, PromptSet
from .timing import timed_generate
from .verification import Difference, judge_differences

#: Tokens that every arm generates before anything is timed.
_WARM_UP_TOKENS = 64
#: Room for a chat template's own tokens.
_TEMPLATE_TOKENS = 64


@dataclass(frozen=True)
class Settings:
    """How every request is decoded, and how often.

    Attributes:
        max_new_tokens: Most tokens to generate for a request.
        repeats: Times each arm answers each request; its times are medians.
        seed: Prompt i is sampled with `seed + i`, and intervals are resampled with it.
        generation: What else `generate` gets, such as `do_sample=True, temperature=0.8`.
    """

    max_new_tokens: int = 256
    repeats: int = 3
    seed: int = 0
    generation: dict[str, Any] = field(default_factory=lambda: {"do_sample": False})

    @property
    def options(self) -> dict[str, Any]:
        return {**self.generation, "max_new_tokens": self.max_new_tokens}


@dataclass
class Sample:
    """One request, answered by all arms.

    Attributes:
        prompt: Index of the prompt it belongs to: the turns of a conversation share one.
        inputs: The request.
        seed: Seed of every call.
        arms: Measurements by arm.
        differences: For every arm that ought to give plain decoding's tokens, the rows where it does not.
    """

    prompt: int
    inputs: Inputs
    seed: int
    arms: dict[str, ArmResult] = field(default_factory=dict)
    differences: dict[str, tuple[Difference, ...]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.inputs["input_ids"].shape[0]

    @property
    def repeated_4grams(self) -> float:
        """Share of 4-grams that plain decoding's continuation has had before, mean over rows."""
        generated = self.arms["plain"].sequence[:, self.inputs["input_ids"].shape[1] :].tolist()
        return sum(map(repeated_ngrams, generated)) / len(generated)


@dataclass
class Section:
    """Requests reported together.

    Attributes:
        name: Of the prompts.
        batch: Rows of a request.
        started: Requests, the last of which may have been cut off.
        skipped: Why arms could not run.
        notes: What a reader must know of the prompts.
        source: The data set of the Hub they are from, if they are.
    """

    name: str
    batch: int = 1
    started: list[Sample] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    source: HubSet | None = None

    @property
    def samples(self) -> list[Sample]:
        """Requests that every arm has answered at least once."""
        return [sample for sample in self.started if sample.arms]


class Benchmark:
    """One run over some prompts and batch sizes.

    Args:
        target: Target.
        drafter: Its drafter.
        tokenizer: Their tokenizer.
        prompt_sets: Prompts, a section for each.
        arms: Names of arms; `plain` is always among them.
        settings: How requests are decoded.
        batch_sizes: Rows of further sections, whose batches mix all prompts' first turns.
        beside: Further drafters for the target by name, whose arms are `ARM@NAME`.

    Attributes:
        names: Arms asked for, in order, those that `oracle` chooses among included.
        datasets: A section for each prompt set.
        batches: A section for each batch size.
        partial: Whether the run was interrupted.
        warnings: What this package warned of, by arm.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: BlockDrafter,
        tokenizer: PreTrainedTokenizerBase,
        prompt_sets: Sequence[PromptSet],
        arms: Sequence[str],
        settings: Settings | None = None,
        batch_sizes: Sequence[int] = (),
        beside: Mapping[str, BlockDrafter] | None = None,
    ) -> None:
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.prompt_sets, self.settings = prompt_sets, settings or Settings()
        self.names = parse_arms(arms, list(beside or ()))
        self.arms, self._unavailable = build_arms(self.names, Pair(target, drafter, self._max_length()), beside)
        self.datasets = [Section(prompts.name, notes=prompts.notes, source=prompts.source) for prompts in prompt_sets]
        self.batches = [Section(f"batch {size}", size) for size in batch_sizes]
        self.partial = False
        self.warnings = CollectedWarnings()
        self._failed: dict[int, dict[str, str]] = {}
        self._turn = 0

    def _max_length(self) -> int:
        def length(turns: tuple[str, ...]) -> int:
            said = sum(len(self.tokenizer(turn)["input_ids"]) for turn in turns)
            return said + len(turns) * (self.settings.max_new_tokens + _TEMPLATE_TOKENS)

        return max(length(turns) for prompts in self.prompt_sets for turns in prompts.prompts)

    @property
    def steps(self) -> int:
        """Times that `run` calls back if it is not interrupted."""
        turns = [len(turns) for prompts in self.prompt_sets for turns in prompts.prompts]
        batches = sum(len(turns) // section.batch for section in self.batches)
        return (sum(turns) + batches) * self.settings.repeats

    def run(self, advance: Callable[[str], None] = lambda section: None) -> None:
        """Measures everything; an interrupt (Ctrl-C) ends it and keeps the repeats that all arms had finished.

        Args:
            advance: Called with the section's name after every repeat of a request.
        """
        try:
            for section, prompts in zip(self.datasets, self.prompt_sets, strict=True):
                arms = self._ready(section, prompts.prompts[0], prompts.chat)
                for index, turns in enumerate(prompts.prompts):
                    self._converse(section, arms, index, turns, prompts.chat, advance)
            for section in self.batches:
                self._measure_batches(section, advance)
        except KeyboardInterrupt:
            self.partial = True
        for section in (*self.datasets, *self.batches):
            for sample in section.samples:
                self._judge(sample)

    def _converse(
        self,
        section: Section,
        arms: dict[str, Arm],
        index: int,
        turns: tuple[str, ...],
        chat: bool,
        advance: Callable[[str], None],
    ) -> None:
        """Measures a prompt's turns. All arms go on from plain decoding's answers, which are every exact arm's own."""
        answers: list[str] = []
        for turn in range(1, len(turns) + 1):
            inputs = encode_turns(self.tokenizer, turns[:turn], answers, chat=chat, device=self.target.device)
            sample = Sample(index, inputs, self.settings.seed + index)
            self._measure(section, sample, arms, advance)
            answer = sample.arms["plain"].sequence[0, inputs["input_ids"].shape[1] :]
            answers.append(self.tokenizer.decode(answer, skip_special_tokens=True))

    def _measure_batches(self, section: Section, advance: Callable[[str], None]) -> None:
        requests = list(self._first_turns())
        count = len(requests) // section.batch
        if not count:
            section.skipped = dict.fromkeys(self.names, f"there are only {len(requests)} prompts")
            return
        arms = self._ready(section, *requests[0])
        pad = self.tokenizer.pad_token_id or 0
        for index in range(count):
            rows = requests[index * section.batch : (index + 1) * section.batch]
            inputs = [
                encode_turns(self.tokenizer, turns[:1], [], chat=chat, device=self.target.device)
                for turns, chat in rows
            ]
            sample = Sample(index, pad_left(inputs, pad), self.settings.seed + index)
            self._measure(section, sample, arms, advance)

    def _first_turns(self) -> Iterator[tuple[tuple[str, ...], bool]]:
        """Prompts of all sets in turns, so that batches are mixed, each with whether it is a chat."""
        for round_ in zip_longest(*(prompts.prompts for prompts in self.prompt_sets)):
            for prompts, turns in zip(self.prompt_sets, round_, strict=True):
                if turns is not None:
                    yield turns, prompts.chat

    def _ready(self, section: Section, turns: tuple[str, ...], chat: bool) -> dict[str, Arm]:
        """Arms that can run at a section's batch size, warmed up. One refused there is skipped with its error."""
        if section.batch not in self._failed:
            self._failed[section.batch] = failed = {}
            one = encode_turns(self.tokenizer, turns[:1], [], chat=chat, device=self.target.device)
            inputs = pad_left([one] * section.batch, 0)
            tokens = min(self.settings.max_new_tokens, _WARM_UP_TOKENS)
            for name, arm in self.arms.items():
                if arm.single_row and section.batch > 1:
                    failed[name] = "decodes one row at a time"
                    continue
                options = {**self.settings.options, "max_new_tokens": tokens, **arm.options}
                try:
                    with self.warnings.of(name):
                        timed_generate(self.target, inputs, seed=self.settings.seed, **options)
                except (ImportError, RuntimeError, ValueError) as error:
                    if name == "plain":
                        raise
                    failed[name] = f"{type(error).__name__}: {error}"
        section.skipped = self._unavailable | self._failed[section.batch]
        return {name: arm for name, arm in self.arms.items() if name not in section.skipped}

    def _measure(self, section: Section, sample: Sample, arms: dict[str, Arm], advance: Callable[[str], None]) -> None:
        section.started.append(sample)
        names = list(arms)
        for _ in range(self.settings.repeats):
            # Each arm takes each place in turn, so that none always follows the same one.
            first = self._turn % len(names)
            self._turn += 1
            results = dict(sample.arms)
            for name in names[first:] + names[:first]:
                before = results.get(name, ArmResult())
                options = {**self.settings.options, **arms[name].options}
                with self.warnings.of(name):
                    call = timed_generate(self.target, sample.inputs, seed=sample.seed, **options)
                report = getattr(arms[name].drafter, "last_report", None)
                reports = before.reports if report is None else [*before.reports, report]
                results[name] = ArmResult([*before.calls, call], reports)
            # At once, so that an interrupt never leaves some arms a repeat ahead.
            sample.arms = {name: results[name] for name in names}
            advance(section.name)

    def _judge(self, sample: Sample) -> None:
        """Compares with plain decoding whatever ought to equal it."""
        sampled = self.settings.generation.get("do_sample", False)
        plain = sample.arms["plain"].sequence
        for name, result in sample.arms.items():
            if sampled and not self.arms[name].exact:
                continue
            outputs = [call.sequence for call in result.calls if not torch.equal(call.sequence, plain)]
            sample.differences[name] = (
                judge_differences(
                    self.target, sample.inputs, plain, outputs[0], seed=sample.seed, **self.settings.options
                )
                if outputs
                else ()
            )
