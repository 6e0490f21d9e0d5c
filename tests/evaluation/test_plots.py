"""Every figure is drawn and is no blank."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from made_up import arm, report, sample, section

from hf_treespec.evaluation import plots
from hf_treespec.evaluation.results import summarise_arm


def results():
    found = section(
        *(
            sample(
                prompt,
                plain=arm(4.0),
                tree_4=arm(2.0, reports=(report(4, 10, 16),)),
                tree_8=arm(1.0 + prompt / 5, reports=(report(2, 10, 16),)),
            )
            for prompt in range(3)
        )
    )
    found.skipped["auto"] = "not here"
    rows = [summarise_arm(found, name) for name in ("plain", "tree-4", "tree-8", "auto")]
    batches = [{"batch": 2, "arms": rows}, {"batch": 4, "arms": rows}]
    return {"datasets": [{"dataset": "made up/x", "arms": rows}], "batches": batches}


def test_all_figures(tmp_path: Path):
    paths = plots.write_plots(
        results(),
        tmp_path / "figures",
        predicted_ms={1: 1.0, 4: 1.5, 8: 2.0},
        histories={"auto": [1, 4, 8, 8], "bastion": [32, 32]},
        reliability=[(0.1, 0.12, 40.0), (0.9, 0.8, 10.0), (0.5, 0.0, 0.0)],
    )
    kinds = ("speedup", "stages", "nodes", "latency")
    expected = {f"{kind}-{key}.png" for kind in kinds for key in ("made-up-x", "batch-2", "batch-4")}
    assert {path.name for path in paths} == expected | {"nodes-by-round.png", "reliability.png", "batches.png"}
    assert all(path.stat().st_size > 5000 for path in paths)


def test_nothing_measured_draws_nothing(tmp_path: Path):
    empty = {"datasets": [{"dataset": "x", "arms": [summarise_arm(section(), "plain")]}], "batches": []}
    assert plots.write_plots(empty, tmp_path) == []


def test_axes_say_what_they_show_and_bars_begin_at_zero():
    figures = [
        plots.plot_speedups([("plain", 1.0, None), ("tree-8", 2.5, (2.2, 2.8))], "x"),
        plots.plot_stages({"tree-8": {"verify": 2.0, "walk": 0.5}}, "x"),
        plots.plot_nodes([(4, 2.0, 1.5, (1.4, 1.6)), (8, 2.5, 1.7, None)], "x"),
        plots.plot_latency({4: 2.0, 8: 2.5}, None, "x"),
        plots.plot_histories({"auto": [1, 2]}),
        plots.plot_batches({"plain": [(1, 90.0, 1.0), (2, 150.0, 1.2)], "chain": [(1, 120.0, 0.8)]}),
        plots.plot_reliability([(0.5, 0.5, 3.0)]),
        plots.plot_distances({"dflash": [0.2, 0.5], "treeflash": [0.2, 0.3]}),
        plots.plot_coverage({"dflash": {"1": [0.7, 0.5], "5": [0.9, 0.8]}}),
        plots.plot_children({"dflash": {"on": (0.7, 900), "off": (None, 0)}, "treeflash": {"on": (0.7, 900)}}),
    ]
    for figure in figures:
        assert figure.axes[-1].get_xlabel()
        assert all(axes.get_ylabel() or axes.get_yticklabels() for axes in figure.axes)
    for figure in figures[:2]:
        assert figure.axes[0].get_xlim()[0] == 0
    for figure in (*figures[2:5], *figures[6:]):
        assert all(axes.get_ylim()[0] == 0 for axes in figure.axes)
