"""Figures of a benchmark's results. Every function takes plain numbers; `write_plots` takes the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .arms import tree_nodes

try:
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("Figures need matplotlib: pip install 'hf-treespec[plots]'.") from error

_BLUE, _ORANGE, _GREY = "#3b6fb6", "#d9822b", "#888888"


def write_plots(
    report: Mapping[str, Any],
    folder: Path,
    *,
    predicted_ms: Mapping[int, float] | None = None,
    histories: Mapping[str, Sequence[int]] | None = None,
    reliability: Sequence[tuple[float, float, float]] | None = None,
) -> list[Path]:
    """Writes the figures that the results are enough for, as PNG.

    Args:
        report: The benchmark's JSON.
        folder: Where to put them; made where it is not there.
        predicted_ms: Milliseconds that a controller expects a verification of N rows to take, by N.
        histories: Rows verified in each round of a call, by arm.
        reliability: `(promised, accepted, count)` of nodes of similar path score.

    Returns:
        The files.
    """
    figures: dict[str, Figure] = {}
    for section in (*report["datasets"], *report["batches"]):
        title = section.get("dataset") or f"batch {section['batch']}"
        key = "".join(letter if letter.isalnum() else "-" for letter in title)
        rows = [row for row in section["arms"] if row["skipped"] is None and row["speedup"] is not None]
        if not rows:
            continue
        figures[f"speedup-{key}"] = plot_speedups(
            [(row["arm"], row["speedup"], row["speedup_ci95"]) for row in rows], title
        )
        stages = {row["arm"]: row["ms_per_round"] for row in rows if row["ms_per_round"]}
        if stages:
            figures[f"stages-{key}"] = plot_stages(stages, title)
        trees = sorted((nodes, row) for row in rows if (nodes := tree_nodes(row["arm"])) is not None)
        if len(trees) < 2:
            continue
        figures[f"nodes-{key}"] = plot_nodes(
            [(nodes, row["acceptance_length"] or 1.0, row["speedup"], row["speedup_ci95"]) for nodes, row in trees],
            title,
        )
        measured = {nodes: row["ms_per_round"]["verify"] for nodes, row in trees if row["ms_per_round"]}
        if measured:
            figures[f"latency-{key}"] = plot_latency(measured, predicted_ms, title)
    curves: dict[str, list[tuple[int, float, float]]] = {}
    # One set of prompts, answered one by one, is what the batches are made of.
    single = [(1, section) for section in report["datasets"]] if len(report["datasets"]) == 1 else []
    for batch, section in [*single, *((section["batch"], section) for section in report["batches"])]:
        for row in section["arms"]:
            if row["tokens_per_second"] is not None:
                point = (batch, row["tokens_per_second"], row["request_seconds"])
                curves.setdefault(row["arm"], []).append(point)
    if any(len(points) > 1 for points in curves.values()):
        figures["batches"] = plot_batches(curves)
    if histories:
        figures["nodes-by-round"] = plot_histories(histories)
    if reliability:
        figures["reliability"] = plot_reliability(reliability)
    return save_figures(figures, folder)


def save_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Writes figures as PNG into a folder, made where it is not there. Returns the files, `NAME.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path, dpi=144)
    return paths


def _figure(title: str, height: float = 3.6) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot_speedups(rows: Sequence[tuple[str, float, Sequence[float] | None]], title: str) -> Figure:
    """Bars of `(arm, speed-up, 95 % interval)`."""
    figure, axes = _figure(f"{title}: decode-only speed-up, 95 % intervals", 1.4 + 0.32 * len(rows))
    places = range(len(rows))
    axes.barh(places, [value for _, value, _ in rows], color=_BLUE, height=0.7)
    for place, (_, value, interval) in zip(places, rows, strict=True):
        low, high = interval or (value, value)
        axes.plot([low, high], [place, place], color="black", linewidth=1.2)
        axes.annotate(f"{value:.2f}×", (max(value, high), place), (4, 0), textcoords="offset points", va="center")
    axes.axvline(1.0, color=_GREY, linewidth=1, linestyle="--")
    axes.set_yticks(places, [arm for arm, _, _ in rows])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("plain decoding's time per token ÷ the arm's")
    return figure


def plot_nodes(points: Sequence[tuple[int, float, float, Sequence[float] | None]], title: str) -> Figure:
    """Acceptance length and speed-up against the budget, of `(N, τ, speed-up, 95 % interval)`."""
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    sizes = [nodes for nodes, _, _, _ in points]
    upper.plot(sizes, [tau for _, tau, _, _ in points], color=_ORANGE, marker="o")
    upper.set_ylabel("τ, tokens committed a round")
    lower.plot(sizes, [value for _, _, value, _ in points], color=_BLUE, marker="o")
    bounded = [(nodes, interval) for nodes, _, _, interval in points if interval]
    lower.fill_between(
        [nodes for nodes, _ in bounded],
        [interval[0] for _, interval in bounded],
        [interval[1] for _, interval in bounded],
        color=_BLUE,
        alpha=0.2,
        linewidth=0,
        label="95 % interval",
    )
    lower.axhline(1.0, color=_GREY, linewidth=1, linestyle="--", label="plain decoding")
    lower.set_ylabel("decode-only speed-up, ×")
    lower.set_xlabel("N, rows verified a round, the root included")
    lower.legend(frameon=False)
    lower.set_xscale("log", base=2)
    lower.set_xticks(sizes, [str(nodes) for nodes in sizes])
    lower.minorticks_off()
    upper.set_title(f"{title}: fixed trees")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_batches(curves: Mapping[str, Sequence[tuple[int, float, float]]]) -> Figure:
    """Throughput and a request's latency by batch size: `(B, tokens a second, seconds)` for each arm."""
    figure = Figure(figsize=(6.4, 6.4), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    sizes = sorted({batch for points in curves.values() for batch, _, _ in points})
    for arm, points in curves.items():
        style = {"color": _GREY, "linestyle": "--"} if arm == "plain" else {}
        batches = [batch for batch, _, _ in points]
        upper.plot(batches, [speed for _, speed, _ in points], marker="o", label=arm, **style)
        lower.plot(batches, [seconds for _, _, seconds in points], marker="o", **style)
    upper.set_title("Batch sizes")
    upper.set_ylabel("tokens a second, all rows")
    upper.legend(frameon=False)
    lower.set_ylabel("seconds from request to last token")
    lower.set_xlabel("rows of a request")
    lower.set_xscale("log", base=2)
    lower.set_xticks(sizes, [str(size) for size in sizes])
    lower.minorticks_off()
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_latency(measured_ms: Mapping[int, float], predicted_ms: Mapping[int, float] | None, title: str) -> Figure:
    """Time to verify N rows, measured and, where a controller predicts it, predicted."""
    figure, axes = _figure(f"{title}: verification forward")
    axes.plot(list(measured_ms), list(measured_ms.values()), "o", color=_BLUE, label="measured, mean over rounds")
    if predicted_ms:
        sizes = sorted(predicted_ms)
        axes.plot(sizes, [predicted_ms[size] for size in sizes], color=_ORANGE, label="predicted")
    return _label_latency(figure, axes)


def plot_calibration(curves: Mapping[int, Sequence[float]], points: Sequence[tuple[int, int, float]]) -> Figure:
    """Predicted T(1), T(2), … by context, over measured `(context, N, ms)`."""
    figure, axes = _figure("verification forward: predicted and measured")
    for index, (context, curve) in enumerate(curves.items()):
        measured = [(nodes, ms) for at, nodes, ms in points if at == context]
        axes.plot(range(1, len(curve) + 1), curve, color=f"C{index}", label=f"predicted, context {context}")
        axes.plot(
            [nodes for nodes, _ in measured],
            [ms for _, ms in measured],
            "o",
            color=f"C{index}",
            label=f"measured, context {context}",
        )
    return _label_latency(figure, axes)


def _label_latency(figure: Figure, axes: Any) -> Figure:
    axes.set_xlabel("N, rows verified, the root included")
    axes.set_ylabel("T(N), ms")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def plot_histories(histories: Mapping[str, Sequence[int]]) -> Figure:
    """Rows verified in each round of one call, a line an arm."""
    figure, axes = _figure("rows verified over one call")
    for arm, nodes in histories.items():
        axes.step(range(1, len(nodes) + 1), nodes, where="mid", label=arm, linewidth=1.2)
    axes.set_xlabel("round")
    axes.set_ylabel("N, rows verified with the root")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize="small", ncols=2)
    return figure


def plot_stages(stages: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """Where a round's time goes: stacked bars of milliseconds by stage, one an arm."""
    figure, axes = _figure(f"{title}: a round's time by stage", 1.8 + 0.32 * len(stages))
    names = list(dict.fromkeys(name for row in stages.values() for name in row))
    left = [0.0] * len(stages)
    for index, name in enumerate(names):
        widths = [row.get(name, 0.0) for row in stages.values()]
        axes.barh(range(len(stages)), widths, left=left, label=name, color=f"C{index}", height=0.7)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(stages)), list(stages))
    axes.invert_yaxis()
    axes.set_xlabel("ms a round")
    figure.legend(loc="outside lower center", ncols=len(names), frameon=False, fontsize="small")
    return figure


def plot_reliability(bins: Sequence[tuple[float, float, float]]) -> Figure:
    """How often nodes were accepted against how often their path scores promised it; areas are counts."""
    figure, axes = _figure("reliability of path scores", 4.6)
    bins = [row for row in bins if row[2] > 0]
    largest = max((count for _, _, count in bins), default=1.0)
    axes.plot([0, 1], [0, 1], color=_GREY, linewidth=1, linestyle="--", label="as promised")
    axes.scatter(
        [promised for promised, _, _ in bins],
        [accepted for _, accepted, _ in bins],
        [20 + 180 * count / largest for _, _, count in bins],
        color=_BLUE,
        label="nodes of similar score, area by number",
    )
    axes.set_xlabel("promised: mean path score ρ")
    axes.set_ylabel("accepted: share of nodes on the walk")
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, loc="upper left")
    return figure


def plot_distances(curves: Mapping[str, Sequence[float]]) -> Figure:
    """Total variation distance to the target at depths 1, 2, …, a line a drafter."""
    figure, axes = _figure("distance between draft and target")
    for name, values in curves.items():
        axes.plot(range(1, len(values) + 1), values, marker="o", label=name)
    axes.set_ylabel("total variation distance")
    return _label_depths(figure, axes)


def plot_coverage(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """The target's probability of the draft's k best tokens by depth, of `{drafter: {k: values}}`."""
    figure, axes = _figure("target tokens among the draft's k best")
    for index, (name, ranks) in enumerate(curves.items()):
        for (rank, values), style in zip(ranks.items(), ("-", "--", ":", "-.") * len(ranks), strict=False):
            axes.plot(
                range(1, len(values) + 1), values, color=f"C{index}", linestyle=style, label=f"{name}, k = {rank}"
            )
    axes.set_ylabel("share covered")
    return _label_depths(figure, axes)


def _label_depths(figure: Figure, axes: Any) -> Figure:
    axes.set_xlabel("depth")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(0, 1)
    axes.legend(frameon=False, fontsize="small")
    return figure


def plot_children(sides: Mapping[str, Mapping[str, tuple[float | None, int]]]) -> Figure:
    """Bars of the best children's accuracy on and off the spine, of `{drafter: {side: (accuracy, nodes)}}`."""
    figure, axes = _figure("best child is the target's next token")
    names = list(dict.fromkeys(side for row in sides.values() for side in row))
    width = 0.8 / max(1, len(sides))
    for index, (name, row) in enumerate(sides.items()):
        for place, side in enumerate(names):
            accuracy, nodes = row.get(side, (None, 0))
            left = place + (index - (len(sides) - 1) / 2) * width
            axes.bar(left, accuracy or 0.0, 0.9 * width, color=f"C{index}", label=None if place else name)
            text = f"n = {nodes}" if accuracy is None else f"{accuracy:.2f}\nn = {nodes}"
            axes.annotate(text, (left, accuracy or 0.0), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("where the node stands")
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1.1)
    axes.legend(frameon=False)
    return figure
