"""Simulated machines and drafters, whose best rate is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from hf_treespec.budget import BudgetPolicy, ForwardKind, RoundRecord, Workload
from hf_treespec.trees import DraftLattice
from hf_treespec.trees.expansion import expand_heap

#: Milliseconds of a verification forward of a 0.6 B model on two CPU cores.
CPU_CURVE = {1: 84.0, 2: 164.0, 8: 195.0, 16: 217.0, 32: 300.0, 64: 450.0}
#: A dense model of 0.6 billion parameters in two bytes each.
DENSE = Workload(row_flops=1.2e9, weight_bytes=1.2e9, row_bytes=2e6)
#: 128 experts, 8 a row.
MIXTURE = Workload(6e9, 1e9, 4e6, expert_bytes=5.6e10, experts=128, experts_per_row=8)

Curve = Callable[[np.ndarray, int], np.ndarray]


def cpu(rows: np.ndarray, context: int) -> np.ndarray:
    sizes, ms = list(CPU_CURVE), list(CPU_CURVE.values())
    beyond = np.maximum(rows - 64, 0) * (450 - 300) / 32
    return np.exp(np.interp(np.log(rows), np.log(sizes), np.log(ms))) + beyond + 0.004 * context


def flat(rows: np.ndarray, context: int) -> np.ndarray:
    """A GPU on which 64 rows are hardly dearer than one."""
    return 12.0 + 0.008 * rows + 0.0004 * context


def cliff(rows: np.ndarray, context: int) -> np.ndarray:
    """Kernels that take 16 rows at once: the 17th costs another turn."""
    return 10.0 + 3.5 * np.ceil(rows / 16) + 0.001 * context


def mixture(rows: np.ndarray, context: int) -> np.ndarray:
    """Each row brings experts along that no other row reads."""
    return 1e3 * MIXTURE.bytes(rows.astype(float), context) / 3e12 + 3.0 + 0.0005 * context


@dataclass
class Machine:
    """A latency curve with noise, outliers and perhaps a change on the way."""

    curve: Curve
    draft_ms: float
    other_ms: float = 0.3
    noise: float = 0.03
    outliers: float = 0.01
    drift: Callable[[int], float] = lambda turn: 1.0
    #: What the rows add that ride along with so many nodes; None = nothing rides.
    riders: Callable[[np.ndarray], np.ndarray] | None = None
    #: How many times longer the first forward of a size takes, and the sizes that had theirs.
    cold: float = 1.0
    seen: set[int] = field(default_factory=set)

    def warm_up(self, rows: int) -> float:
        first = rows not in self.seen
        self.seen.add(rows)
        return self.cold if first else 1.0

    def verify_ms(self, rows: int | np.ndarray, context: int, turn: int = 0) -> np.ndarray:
        return self.curve(np.asarray(rows, dtype=np.float64), context) * self.drift(turn)

    def drafted_ms(self, rows: int | np.ndarray, context: int, turn: int = 0) -> np.ndarray:
        """The verification of a drafted round."""
        riders = 0.0 if self.riders is None else self.riders(np.asarray(rows, dtype=np.float64)) * self.drift(turn)
        return self.verify_ms(rows, context, turn) + riders

    def measured(self, ms: float, draw: np.random.Generator) -> float:
        spike = 6.0 if draw.random() < self.outliers else 1.0
        return float(ms * math.exp(self.noise * draw.standard_normal()) * spike)


@dataclass
class Drafter:
    """A pool of draft trees, and how often the target really takes their nodes.

    `honesty` multiplies the conditional probability of every node: 1 keeps its promise, less is over-confident, the
    more the deeper.
    """

    seed: int = 0
    honesty: float = 1.0
    trees: int = 96
    depth: int = 7
    nodes: int = 64
    scores: np.ndarray = field(init=False)
    depths: np.ndarray = field(init=False)
    parents: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        draw = np.random.default_rng(self.seed)
        sharpness = draw.gamma(4.0, 0.7, (self.trees, self.depth, 1))
        logits = sharpness * draw.standard_normal((self.trees, self.depth, 32))
        log_probs = torch.from_numpy(logits).float().log_softmax(-1).sort(-1, descending=True).values[..., :16]
        tokens = torch.arange(16).expand(self.trees, self.depth, 16)
        tree = expand_heap(DraftLattice.marginal(tokens, log_probs), torch.zeros(self.trees).long(), self.nodes)
        self.scores, self.depths, self.parents = tree.scores().numpy(), tree.depths.numpy(), tree.parents.numpy()

    def reached(self) -> np.ndarray:
        """True probability that the walk reaches each node, `[trees, N]`."""
        return self.scores * self.honesty**self.depths

    def path(self, tree: int, draw: np.random.Generator) -> list[int]:
        """The nodes a walk takes through the whole tree."""
        reached, parents = self.reached_of(tree), self.parents[tree]
        path = [0]
        while True:
            children = np.flatnonzero(parents == path[-1])
            steps = np.cumsum(reached[children] / reached[path[-1]]) if len(children) else np.zeros(0)
            taken = int(np.searchsorted(steps, draw.random()))
            if taken == len(children):
                return path
            path.append(int(children[taken]))

    def reached_of(self, tree: int) -> np.ndarray:
        return self.scores[tree] * self.honesty ** self.depths[tree]


@dataclass
class Run:
    """What a simulated run did; expectations, so that luck does not count."""

    tokens: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)

    def rate(self, start: int = 0) -> float:
        return sum(self.tokens[start:]) / sum(self.ms[start:])


def simulate(
    policy: BudgetPolicy,
    machine: Machine,
    drafter: Drafter | Callable[[int], Drafter],
    rounds: int = 10**9,
    tokens: int = 10**9,
    context: int = 128,
    seed: int = 1,
    batch: int = 1,
    grows: bool = True,
) -> Run:
    """Runs rounds until there are as many as wanted, or as many drawn tokens of a row."""
    draw, run = np.random.default_rng(seed), Run()
    policy.begin(context, batch)
    done, order = 0.0, draw.permutation(96)
    records: list[RoundRecord] = []
    for turn in range(rounds):
        if done >= tokens:
            break
        source = drafter if isinstance(drafter, Drafter) else drafter(turn)
        drafts = policy.should_draft()
        nodes, accepted_nodes = 1, [[0]] * batch
        promised, accepted, expected = [0.0], [0], float(batch)
        if drafts:
            # Each tree of the pool has its turn, so that runs differ in what they do, not in what they get.
            trees, order = order[:batch] % source.trees, np.roll(order, -batch)
            wide = min(policy.largest(), source.nodes)
            scores, depths = source.scores[trees, :wide], source.depths[trees, :wide]
            rides = machine.riders is not None
            nodes = policy.choose(torch.from_numpy(scores), torch.from_numpy(depths), riding=rides)
            accepted_nodes = [[n for n in source.path(int(tree), draw) if n < nodes] for tree in trees]
            deepest = int(depths[:, :nodes].max())
            promised = [float(scores[:, :nodes][depths[:, :nodes] == d].sum()) for d in range(deepest + 1)]
            accepted = [sum(len(path) > d for path in accepted_nodes) for d in range(deepest + 1)]
            expected = float(source.reached()[trees, :nodes].sum())
        verify = float((machine.drafted_ms if drafts else machine.verify_ms)(nodes, context, turn))
        draft = machine.draft_ms * machine.drift(turn) if drafts else 0.0
        other = machine.other_ms * machine.drift(turn)
        drawn = sum(map(len, accepted_nodes))
        # Outliers and warm-ups cost nothing that could have been avoided: they stay out of what a policy is judged by.
        run.tokens.append(expected)
        run.ms.append(draft + verify + other)
        run.nodes.append(nodes if drafts else 1)
        run.drawn.append(drawn)
        records.append(
            RoundRecord(
                nodes,
                drafts,
                batch,
                batch,
                context,
                machine.measured(draft, draw) if drafts else 0.0,
                machine.measured(verify, draw) * machine.warm_up(nodes),
                machine.measured(other, draw),
                drawn,
                drawn // batch,
                promised,
                accepted,
                ForwardKind(riding=drafts and machine.riders is not None),
            )
        )
        if len(records) >= policy.patience:
            policy.record_all(records)
            records.clear()
        run.reasons.append(policy.reason)
        context += int(drawn / batch) if grows else 0
        done += drawn / batch
    return run


def simulate_calls(
    policy: BudgetPolicy,
    machine: Machine,
    drafter: Drafter,
    calls: int,
    batch: int,
    tokens: int = 64,
    context: int = 128,
    seed: int = 1,
) -> list[float]:
    """Milliseconds without noise of calls, each of which ends when all of its rows have so many tokens."""
    draw, spent = np.random.default_rng(seed), []
    for _ in range(calls):
        done, total = [0] * batch, 0.0
        policy.begin(context, batch)
        while min(done) < tokens:
            live = [row for row in range(batch) if done[row] < tokens]
            leads = [done[row] - min(done[row] for row in live) for row in live]
            drafts, nodes, steps, promised, accepted = policy.should_draft(), 1, [1] * len(live), [0.0], [0]
            if drafts:
                trees = draw.integers(drafter.trees, size=len(live))
                wide = min(policy.largest(), drafter.nodes)
                scores, depths = drafter.scores[trees, :wide], drafter.depths[trees, :wide]
                nodes = policy.choose(torch.from_numpy(scores), torch.from_numpy(depths), leads)
                steps = [sum(n < nodes for n in drafter.path(int(tree), draw)) for tree in trees]
                deepest = int(depths[:, :nodes].max())
                promised = [float(scores[:, :nodes][depths[:, :nodes] == d].sum()) for d in range(deepest + 1)]
                accepted = [sum(taken > d for taken in steps) for d in range(deepest + 1)]
            verify, draft = float(machine.verify_ms(nodes, context)), machine.draft_ms if drafts else 0.0
            total += verify + draft + machine.other_ms
            policy.record(
                RoundRecord(
                    nodes,
                    drafts,
                    batch,
                    len(live),
                    context,
                    machine.measured(draft, draw) if drafts else 0.0,
                    machine.measured(verify, draw),
                    machine.measured(machine.other_ms, draw),
                    sum(steps),
                    min(lead + taken for lead, taken in zip(leads, steps, strict=True)),
                    promised,
                    accepted,
                )
            )
            for row, taken in zip(live, steps, strict=True):
                done[row] += taken
        spent.append(total)
    return spent


def best_rates(machine: Machine, drafter: Drafter, context: int, turn: int = 0) -> dict[str, float]:
    """The best tokens per ms that a policy reaches which knows the truth: adaptive, with one N, and plain."""
    surrogate = drafter.reached().cumsum(1)
    verify = machine.drafted_ms(np.arange(1, drafter.nodes + 1), context, turn)
    beside = (machine.draft_ms + machine.other_ms) * machine.drift(turn)
    plain = 1 / float(machine.verify_ms(1, context, turn) + machine.other_ms * machine.drift(turn))
    fixed = surrogate.mean(0) / (verify + beside)
    rate = float(fixed.max())
    for _ in range(30):  # Dinkelbach
        chosen = (surrogate - rate * verify).argmax(1)
        rate = float(surrogate[np.arange(len(chosen)), chosen].sum() / (verify[chosen] + beside).sum())
    return {"adaptive": max(rate, plain), "fixed": max(float(fixed.max()), plain), "plain": plain}
