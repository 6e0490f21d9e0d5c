"""Arms by name: what is unknown is refused, what cannot run says why."""

from __future__ import annotations

import pytest
import torch
from pairs import Pair as Loaded
from pairs import build_pair

from hf_treespec.drafters.dflash import DFlashDrafter
from hf_treespec.drafters.treeflash import TreeFlashDrafter
from hf_treespec.evaluation import arms
from hf_treespec.evaluation.arms import ARMS, ORACLE_GRID, Pair, build_arms, parse_arms, tree_nodes


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return build_pair()


@pytest.fixture
def pair(loaded: Loaded) -> Pair:
    return Pair(loaded[0], loaded[1], 100)


def test_every_arm_is_known_or_says_why(pair: Pair):
    names = [name.replace("-N", "-4") for name in ARMS]
    built, skipped = build_arms(names, pair)
    assert built.keys() | skipped.keys() | {"oracle"} == set(names)
    assert {"plain", "lookup", "stock-chain", "chain", "tree-4", "marginal-4", "beam-4", "static-4"} <= built.keys()
    assert "needs a treeflash drafter, this one is dflash" in skipped["treeflash-4"]
    for name in ("flex-parallel", "flex-sequential", "flex-auto"):
        assert "needs a flexdraft drafter" in skipped[name]


@pytest.mark.parametrize("name", ["tree", "tree-N", "tree-0", "tree-x", "chain-4", "nothing", ""])
def test_unknown_arms(name: str):
    with pytest.raises(ValueError, match="Unknown arm") as error:
        parse_arms(["plain", name])
    assert all(arm in str(error.value) for arm in ARMS)


def test_plain_is_always_measured_first():
    assert parse_arms(["chain", "plain", "chain"]) == ["plain", "chain"]


def test_the_oracle_brings_its_grid():
    names = parse_arms(["tree-8", "oracle"])
    assert names[-1] == "oracle"
    assert sorted(filter(None, map(tree_nodes, names))) == list(ORACLE_GRID)


def test_options(pair: Pair):
    built, _ = build_arms(["plain", "lookup", "chain", "tree-7", "stock-chain"], pair)
    assert built["plain"].options == {}
    assert built["plain"].drafter is None
    chain = built["chain"].drafter.treespec_config
    assert (chain.shape, chain.budget) == ("chain", 5)
    assert (built["tree-7"].drafter.treespec_config.shape, built["tree-7"].drafter.treespec_config.budget) == (
        "tree",
        7,
    )
    assert [name for name, arm in built.items() if arm.single_row] == ["lookup", "stock-chain"]
    assert [name for name, arm in built.items() if not arm.exact] == ["lookup", "stock-chain"]
    assert pair.drafter.treespec_config is None


def test_options_that_this_version_lacks_are_told(pair: Pair):
    with pytest.raises(arms.UnavailableArmError, match="this version does not know it"):
        arms._with(pair, "auto", budget="no such budget")
    with pytest.raises(arms.UnavailableArmError, match="this version does not know it"):
        arms._with(pair, "flex-auto", no_such_option=1)


def test_compiled_needs_a_compiler(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(arms.shutil, "which", lambda name: None)
    built, skipped = build_arms(["compiled"], pair)
    assert not built
    assert "no C compiler" in skipped["compiled"]
    monkeypatch.setenv("CC", "cc")
    options = build_arms(["compiled"], pair)[0]["compiled"].options
    assert options["cache_implementation"] == "static"
    assert options.get("max_cache_len", 100) == 100


def test_the_compiled_arm_decodes_as_plain(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """Without the compiler's minutes: the same call with an eager backend."""
    monkeypatch.setenv("CC", "cc")
    options = build_arms(["compiled"], pair)[0]["compiled"].options
    options["compile_config"].backend, options["compile_config"].mode = "eager", None
    target = build_pair()[0]
    ids = torch.arange(5, 15)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(target.generate(**inputs, **options), target.generate(**inputs))


def test_a_look_back_head_is_compared_with_its_own_backbone(loaded: Loaded):
    head = TreeFlashDrafter.from_dflash(loaded[1])
    built, skipped = build_arms(
        ["treeflash-4", "marginal-4", "marginal-auto", "auto", "stock-chain"], Pair(loaded[0], head, 100)
    )
    assert list(skipped) == ["stock-chain"]
    for name in ("treeflash-4", "auto"):
        assert built[name].drafter.ar_approximation is head.ar_approximation
    for name in ("marginal-4", "marginal-auto"):
        assert type(built[name].drafter) is DFlashDrafter
        assert built[name].drafter.fc is head.fc
    assert built["marginal-4"].drafter.treespec_config.budget == built["treeflash-4"].drafter.treespec_config.budget


def test_arms_of_further_drafters_are_named_after_them(pair: Pair):
    other = pair.drafter.with_options()
    names = parse_arms(["chain", "chain@other", "tree-4@other"], ["other"])
    built, skipped = build_arms(names, pair, {"other": other})
    assert list(built) == names
    assert skipped == {}
    assert {name: arm.name for name, arm in built.items()} == {name: name for name in names}
    assert built["chain@other"].drafter.weights is other.weights
    assert tree_nodes("tree-4@other") is None  # the oracle chooses among the first drafter's trees


@pytest.mark.parametrize(
    ("name", "message"),
    [("chain@unknown", "no drafter given"), ("oracle@other", "first drafter"), ("x@other", "Unknown")],
)
def test_arms_of_no_further_drafter_are_refused(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse_arms([name], ["other"])
