"""The latency model against machines it was not shown in full."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from machines import CPU_CURVE, DENSE, MIXTURE, Curve, cliff, cpu, flat, mixture

from hf_treespec.budget import AttentionLayers, DevicePeak, ForwardKind, LatencyModel, LatencyPoint, Workload

SIZES = (1, 2, 4, 8, 16, 32, 64)
PEAK = DevicePeak(2e13, 3e12)


def points(curve: Curve, contexts: tuple[int, ...], sizes: tuple[int, ...] = SIZES) -> list[LatencyPoint]:
    return [LatencyPoint(n, c, 1, float(curve(np.array(float(n)), c))) for c in contexts for n in sizes]


def compute_bound(rows: np.ndarray, context: int) -> np.ndarray:
    return np.maximum(9.0, 3.0 + 0.45 * rows) + 0.0006 * context


@pytest.mark.parametrize(
    ("curve", "workload"),
    [(flat, DENSE), (cpu, DENSE), (compute_bound, DENSE), (mixture, MIXTURE)],
    ids=["flat", "cpu", "compute", "mixture"],
)
@pytest.mark.parametrize("contexts", [(256,), (256, 2048)])
def test_unseen_sizes_are_predicted(curve: Curve, workload: Workload, contexts: tuple[int, ...]) -> None:
    model = LatencyModel(workload, PEAK)
    model.fit(points(curve, contexts))
    rows = np.arange(1, 129)
    for context in contexts:
        np.testing.assert_allclose(model.curve(128, context), curve(rows.astype(float), context), rtol=0.15)


def test_the_measured_cpu_is_predicted_from_the_calibration_sizes() -> None:
    model = LatencyModel(DENSE, PEAK)
    model.fit([LatencyPoint(n, 200, 1, ms) for n, ms in CPU_CURVE.items()])
    for rows, ms in CPU_CURVE.items():
        assert model.predict(rows, 200) == pytest.approx(ms, rel=0.06)
    for rows in (3, 4, 6, 12, 24, 48):
        assert model.predict(rows, 200) == pytest.approx(float(cpu(np.array(float(rows)), 0)), rel=0.15)


def test_another_context_is_carried_over_by_the_roofline() -> None:
    workload = Workload(1e9, 1e9, attention=(AttentionLayers(28, None, 4.0 * 16 * 128, 2.0 * 8 * 128 * 2),))

    def curve(rows: np.ndarray, context: int) -> np.ndarray:
        return 1.4e3 * workload.bytes(rows, context) / 1e11

    model = LatencyModel(workload, DevicePeak(1e13, 1e11))
    model.fit(points(curve, (256,)))
    rows = np.arange(1.0, 65.0)
    np.testing.assert_allclose(model.curve(64, 8192), curve(rows, 8192), rtol=0.05)
    assert model.predict(1, 8192) > 1.2 * model.predict(1, 256)


def test_jumps_stay_sharp_at_measured_sizes() -> None:
    model = LatencyModel(DENSE, PEAK)
    model.fit([LatencyPoint(n, 128, 1, ms) for n, ms in ((1, 10.0), (2, 20.0), (16, 21.0), (17, 28.0), (32, 29.0))])
    assert [model.predict(n, 128) for n in (1, 2, 16, 17, 32)] == pytest.approx([10, 20, 21, 28, 29], rel=0.1)


def test_the_curve_never_falls() -> None:
    draw = np.random.default_rng(0)
    model = LatencyModel(DENSE, PEAK)
    model.fit([LatencyPoint(n, 128, 1, float(10 * np.exp(0.2 * draw.standard_normal()))) for n in SIZES])
    for _ in range(50):
        model.update(int(draw.integers(1, 65)), 128, 1, float(10 * np.exp(0.2 * draw.standard_normal())))
    assert (np.diff(model.curve(128, 128)) >= 0).all()


def test_batches_share_sizes() -> None:
    model = LatencyModel(DENSE, PEAK)
    model.fit(points(cliff, (128,)))
    assert model.predict(4, 128, 4) == pytest.approx(float(cliff(np.array(16.0), 128)), rel=0.05)


def test_numbers_and_tensors() -> None:
    model = LatencyModel(DENSE, PEAK)
    model.fit(points(cliff, (128,)))
    rows = torch.tensor([1, 5, 64])
    predicted = model.predict(rows, 128)
    assert predicted.dtype == torch.float64
    assert predicted.tolist() == [model.predict(int(n), 128) for n in rows]


def test_a_drift_is_followed_everywhere() -> None:
    model = LatencyModel(DENSE, PEAK)
    model.fit(points(cliff, (128,)))
    before = model.curve(64, 128).copy()
    draw = np.random.default_rng(0)
    for _ in range(40):
        n = int(draw.choice([8, 16, 32]))
        model.update(n, 128, 1, float(2 * cliff(np.array(float(n)), 128) * np.exp(0.03 * draw.standard_normal())))
    after = model.curve(64, 128)
    np.testing.assert_allclose(after[[7, 15, 31]], 2 * before[[7, 15, 31]], rtol=0.1)
    np.testing.assert_allclose(after[[0, 1, 63]], 2 * before[[0, 1, 63]], rtol=0.25)  # never seen since


@pytest.mark.parametrize("share", [0.2, 1.0, 1.8])
def test_what_longer_contexts_cost_is_learned(share: float) -> None:
    workload = replace(DENSE, attention=(AttentionLayers(28, None, 8192.0, 4096.0),))

    def real(rows: int, context: int) -> float:
        """A machine on which attention costs another share of what the roofline says than the rest does."""
        said = [float(workload.flops(float(rows), columns, 1)) for columns in (128, context)]
        return 10.0 + 2e-9 * (said[0] + share * (said[1] - said[0]))

    model, draw = LatencyModel(workload, PEAK), np.random.default_rng(0)
    model.fit([LatencyPoint(n, 128, 1, real(n, 128)) for n in SIZES])
    for turn in range(60):
        n, context = int(draw.choice([1, 4, 16, 64])), (128, 4096)[turn % 2]
        model.update(n, context, 1, real(n, context) * float(np.exp(0.03 * draw.standard_normal())))
    for n in (1, 6, 16, 48, 64):
        assert model.predict(n, 4096) == pytest.approx(real(n, 4096), rel=0.15)
        assert model.predict(n, 128) == pytest.approx(real(n, 128), rel=0.1)
    again = LatencyModel.from_dict(json.loads(json.dumps(model.to_dict())), workload)
    assert again.predict(48, 4096) == pytest.approx(model.predict(48, 4096), rel=1e-3)


def test_a_lone_outlier_moves_nothing() -> None:
    model = LatencyModel(DENSE, PEAK)
    model.fit(points(cliff, (128,)))
    for _ in range(5):
        model.update(16, 128, 1, 1.02 * model.predict(16, 128))
    before = model.curve(64, 128).copy()
    model.update(16, 128, 1, 10 * model.predict(16, 128))
    np.testing.assert_allclose(model.curve(64, 128), before, rtol=0.02)
    model.update(16, 128, 1, 0.1 * model.predict(16, 128))
    np.testing.assert_allclose(model.curve(64, 128), before, rtol=0.02)


def test_a_new_size_is_learned_where_it_is() -> None:
    model = LatencyModel(DENSE, PEAK)
    model.fit(points(cliff, (128,)))
    assert model.predict(17, 128) < 0.95 * float(cliff(np.array(17.0), 128))
    for _ in range(20):
        model.update(17, 128, 1, float(cliff(np.array(17.0), 128)))
        model.update(16, 128, 1, float(cliff(np.array(16.0), 128)))
    assert model.predict(17, 128) == pytest.approx(float(cliff(np.array(17.0), 128)), rel=0.04)
    assert model.predict(16, 128) == pytest.approx(float(cliff(np.array(16.0), 128)), rel=0.05)


def test_the_better_attention_is_told() -> None:
    model = LatencyModel(DENSE, PEAK)
    dense = [LatencyPoint(n, 128, 1, 5.0 + n) for n in SIZES]
    model.fit(dense)
    assert not model.best_split(64, 128)
    model.fit(dense + [LatencyPoint(n, 128, 1, 10.0 + n / 2, ForwardKind(split=True)) for n in SIZES])
    assert [model.best_split(n, 128) for n in (1, 4, 16, 64)] == [False, False, True, True]
    assert model.predict(64, 128) == pytest.approx(42, rel=0.03)
    assert model.predict(64, 128, split=False) == pytest.approx(69, rel=0.03)
    model.update(64, 128, 1, 40.0, ForwardKind(split=True))


def test_offline_models_stay_and_others_interpolate_without_a_roofline() -> None:
    model = LatencyModel(DENSE, PEAK, online=False)
    model.fit(points(cliff, (128,)))
    before = model.to_dict()
    model.update(16, 128, 1, 99.0)
    assert model.to_dict() == before
    plain = LatencyModel()
    plain.fit(points(cliff, (128,)))
    assert plain.predict(16, 128) == pytest.approx(float(cliff(np.array(16.0), 128)), rel=0.02)


def test_comes_back_from_json() -> None:
    model = LatencyModel(DENSE, PEAK)
    model.fit(points(cpu, (128, 1024)))
    model.update(24, 300, 1, 290.0)
    again = LatencyModel.from_dict(json.loads(json.dumps(model.to_dict(), allow_nan=False)), DENSE)
    np.testing.assert_allclose(again.curve(128, 700), model.curve(128, 700), rtol=1e-4)
    assert again.fitted
    assert not LatencyModel.from_dict(LatencyModel(DENSE).to_dict(), DENSE).fitted


def test_nothing_measured() -> None:
    model = LatencyModel(DENSE, PEAK)
    with pytest.raises(ValueError, match="at least one"):
        model.fit([LatencyPoint(1, 128, 1, float("nan"))])
    with pytest.raises(RuntimeError, match="not fitted"):
        model.predict(1, 128)
    model.update(1, 128, 1, 12.0)
    assert model.predict(1, 128) == pytest.approx(12.0)
