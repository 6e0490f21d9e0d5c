"""`hf-treespec inspect`: what it says of a drafter alone, of pairs that fit and of pairs that do not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import models
import pytest
import transformers
from click.testing import Result
from pairs import VOCAB, build_pair, save_pair
from transformers import PreTrainedModel
from typer.testing import CliRunner

from hf_treespec.cli import app
from hf_treespec.drafters.dflash import DFlashConfig, DFlashDrafter
from hf_treespec.drafters.flexdraft import FlexDraftDrafter
from hf_treespec.drafters.treeflash import TreeFlashDrafter
from hf_treespec.evaluation.inspection import Inspection, draw_layers, inspect_drafter

CARD = "---\nlicense: {licence}\nbase_model: {base}\n---\n# A drafter\n"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target with its tokenizer, and a drafter that fits it."""
    return save_pair(build_pair(), tmp_path_factory.mktemp("pair"))


def edited(source: str, folder: Path, **fields: Any) -> str:
    """A copy of a model whose `config.json` has other fields; `...` removes one."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return str(folder)


def saved_pair(family: str, folder: Path, **fields: Any) -> tuple[str, str]:
    """A tiny target of a family and a drafter for it, as files."""
    target = models.build(family, models.FAMILIES[family].attentions[0])
    target.save_pretrained(folder / "target")
    drafter_for(target, **fields).save_pretrained(folder / "drafter")
    return str(folder / "target"), str(folder / "drafter")


def drafter_for(target: PreTrainedModel, **fields: Any) -> DFlashDrafter:
    given = {"num_hidden_layers": 2, "block_size": 4, "mask_token_id": 3, "target_layer_ids": [0, 2], **fields}
    return DFlashDrafter(DFlashConfig.for_target(target.config, **given)).eval()


def inspect(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["inspect", *arguments], env={"COLUMNS": "200"})


def statuses(found: Inspection) -> dict[str, str]:
    return {finding.rule: finding.status for finding in found.findings}


def test_a_drafter_alone(paths: tuple[str, str]):
    result = inspect(paths[1])
    assert result.exit_code == 0, result.output
    assert f"{paths[1]}: no target given" in result.stdout
    words = " ".join(result.stdout.split())
    assert "DFlashDrafter, config.json of hf_treespec" in words
    assert "block 5 rows, two-way" in words
    assert "looks back all ×1; trained to 512" in words
    assert "rotary base 10,000" in words
    assert "features ●·●· 0, 2 of 4" in words
    assert "licence not stated" in words


def test_a_pair_that_fits(paths: tuple[str, str]):
    result = inspect(paths[1], "--target", paths[0])
    assert result.exit_code == 0, result.output
    assert f"{paths[1]} for {paths[0]}: fits\n" in result.stdout
    assert "✗" not in result.stdout
    assert "!" not in result.stdout


def test_a_pair_that_fits_with_warnings(paths: tuple[str, str], tmp_path: Path):
    rope = {"rope_type": "default", "rope_theta": 1e6}
    result = inspect(edited(paths[1], tmp_path / "drafter", rope_parameters=rope), "--target", paths[0])
    assert result.exit_code == 0, result.output
    assert ": fits with warnings\n" in result.stdout
    words = " ".join(result.stdout.split())
    assert "! rotary embedding the drafter's rope_theta is 1,000,000, the target's 10,000" in words


def test_a_pair_that_does_not_fit(paths: tuple[str, str], tmp_path: Path):
    other = models.build("qwen3", vocab_size=VOCAB, num_hidden_layers=3)
    other.save_pretrained(tmp_path / "target")
    result = inspect(paths[1], "--target", str(tmp_path / "target"))
    assert result.exit_code == 1
    assert ": does not fit\n" in result.stdout
    message = "the target's number of layers is 3, the drafter's num_target_layers is 4; they must be equal. Use the"
    assert "✗ layers " in result.stdout
    assert message in " ".join(result.stdout.split())


def test_every_broken_rule_is_shown(paths: tuple[str, str], tmp_path: Path):
    """A call would stop at the first one."""
    drafter = edited(paths[1], tmp_path / "drafter", vocab_size=7 * VOCAB, mask_token_id=9 * VOCAB)
    found = statuses(inspect_drafter(drafter, paths[0]))
    assert found["vocabulary"] == found["mask token"] == "wrong"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "is no drafter this package knows"),
        ({"num_hidden_layers": 2, "layer_types": ...}, r"num_hidden_layers is 2|Tensors missing: layers\.1\."),
        ({"block_size": 1}, "a block is an anchor and at least one mask"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide' instead of a positive whole number"),
    ],
    ids=["of another kind", "tensors missing", "no block", "a malformed field"],
)
def test_a_drafter_that_does_not_load(paths: tuple[str, str], tmp_path: Path, fields: dict[str, Any], message: str):
    drafter = edited(paths[1], tmp_path / "drafter", **fields)
    result = inspect(drafter, "--target", paths[0], "--json", str(tmp_path / "found.json"))
    assert result.exit_code == 1, result.output
    assert ": does not load\n" in result.stdout
    written = json.loads((tmp_path / "found.json").read_text())
    (finding,) = written["findings"]
    assert finding["status"] == "wrong"
    assert re.search(message, finding["found"])
    assert written["layout"] == written["memory"] == {}


@pytest.mark.parametrize("missing", ["drafter", "target"])
def test_what_is_nowhere(paths: tuple[str, str], missing: str):
    arguments = ["./no/such", "--target", paths[0]] if missing == "drafter" else [paths[1], "--target", "./no/such"]
    result = inspect(*arguments)
    assert result.exit_code == 2
    assert "There is no folder './no/such'" in result.stderr


def test_a_folder_without_a_model(paths: tuple[str, str], tmp_path: Path):
    result = inspect(str(tmp_path))
    assert result.exit_code == 2
    assert "has no config.json" in result.stderr
    shutil.copy(Path(paths[1]) / "config.json", tmp_path)
    result = inspect(str(tmp_path))
    assert result.exit_code == 2
    assert "has no weights" in result.stderr


def test_a_target_that_is_no_causal_lm(paths: tuple[str, str], tmp_path: Path):
    transformers.T5Config(architectures=["T5ForConditionalGeneration"], num_layers=1).save_pretrained(tmp_path)
    result = inspect(paths[1], "--target", str(tmp_path))
    assert result.exit_code == 1
    assert "T5ForConditionalGeneration is an encoder-decoder; a block drafter extends decoder-only" in result.stdout
    transformers.ViTConfig().save_pretrained(tmp_path)
    result = inspect(paths[1], "--target", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")


def test_a_drafter_in_place_of_the_target(paths: tuple[str, str]):
    result = inspect(paths[1], "--target", paths[1])
    assert result.exit_code == 2
    assert "is a drafter (DFlashDrafter). Give the causal LM that it was trained for." in result.stderr


def test_json_holds_everything(paths: tuple[str, str], tmp_path: Path):
    rope = {"rope_type": "default", "rope_theta": 1e6}
    drafter = edited(paths[1], tmp_path / "drafter", rope_parameters=rope)
    file = tmp_path / "found.json"
    assert inspect(drafter, "--target", paths[0], "--json", str(file)).exit_code == 0
    found = json.loads(file.read_text())
    assert (found["drafter"], found["target"]) == (drafter, paths[0])
    assert (found["verdict"], found["family"], found["dialect"]) == (
        "fits with warnings",
        "DFlashDrafter",
        "hf_treespec",
    )
    assert found["layout"] == {
        "layers": 1,
        "hidden_size": 64,
        "heads": 4,
        "key_value_heads": 2,
        "head_dim": 16,
        "block_size": 5,
        "windows": [None],
        "causal": [False],
        "rope": rope,
        "max_position_embeddings": 512,
        "feature_layers": [0, 2],
        "target_layers": 4,
        "vocab_size": VOCAB,
        "mask_token_id": 2,
        "own": {},
    }
    projections = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96
    parameters = projections + 2 * 16 + 2 * 64 + 2 * 64 * 64 + 2 * 64
    assert found["memory"] == {
        "parameters": parameters,
        "dtype": "float32",
        "weight_bytes": {"float32": 4 * parameters, "bfloat16": 2 * parameters, "float16": 2 * parameters},
        "context_bytes_per_position": {"float32": 256, "bfloat16": 128, "float16": 128},
    }
    assert found["origin"] == {"licence": None, "trained_for": None}
    assert all(set(finding) == {"rule", "status", "found", "wanted", "fix"} for finding in found["findings"])
    assert [finding for finding in found["findings"] if finding["status"] == "slow"] == [
        {
            "rule": "rotary embedding",
            "status": "slow",
            "found": "the drafter's rope_theta is 1,000,000, the target's 10,000",
            "wanted": "drafters are trained with their target's, as a rule",
            "fix": "If its config.json lost the field, restore rope_theta there; nothing to do if it was trained so.",
        }
    ]


def test_of_a_target_its_configuration_is_enough(paths: tuple[str, str], tmp_path: Path):
    shutil.copy(Path(paths[0]) / "config.json", tmp_path)
    result = inspect(paths[1], "--target", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert ": fits\n" in result.stdout
    found = inspect_drafter(paths[1], str(tmp_path))
    unchecked = {finding.rule: finding.found for finding in found.findings if finding.status == "not checked"}
    assert unchecked == {
        "mask token": "2; its row not checked without weights",
        "trained for": "not recorded",
        "embeddings": "not checked without weights",
        "mask and tokenizer": "the target has no tokenizer",
    }


def test_with_weights_nothing_that_needs_them_is_left_unchecked(paths: tuple[str, str]):
    result = inspect(paths[1], "--target", paths[0], "--weights")
    assert result.exit_code == 0, result.output
    assert "not checked" not in result.stdout
    assert "– trained for" in result.stdout
    assert "✓ mask token 2, of norm" in " ".join(result.stdout.split())


def test_weights_asked_for_must_be_there(paths: tuple[str, str], tmp_path: Path):
    shutil.copy(Path(paths[0]) / "config.json", tmp_path)
    result = inspect(paths[1], "--target", str(tmp_path), "--weights")
    assert result.exit_code == 2
    assert "model.safetensors" in result.stderr


@pytest.mark.parametrize("weights", [False, True])
def test_a_multimodal_target(tmp_path: Path, weights: bool):
    target, drafter = saved_pair("qwen2_5_vl", tmp_path)
    found = inspect_drafter(drafter, target, weights=weights)
    assert found.verdict == "fits"
    assert statuses(found)["target"] == "fits"
    assert found.findings[0].found == "Qwen2_5_VLForConditionalGeneration"
    assert statuses(found)["embeddings"] == ("fits" if weights else "not checked")


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_targets_with_windows_of_their_own(family: str, tmp_path: Path):
    target, drafter = saved_pair(family, tmp_path)
    assert inspect_drafter(drafter, target).verdict == "fits"


def test_windows_of_a_drafter_are_drawn_by_layer(tmp_path: Path):
    fields = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "is_causal": [True, False]}
    target, drafter = saved_pair("llama", tmp_path, **fields)
    result = inspect(drafter, "--target", target)
    assert "7 ×1, all ×1; trained to 512" in result.stdout
    assert "4 rows, partly causal" in result.stdout


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "the target's embedding and head"),
        ({"own_head": True, "draft_vocab_size": 40}, "its own head of 40 tokens, the target's embedding"),
        (
            {"own_embedding": True, "own_head": True},
            "its own embedding of 97 tokens, its own head of 97 tokens",
        ),
    ],
    ids=["both borrowed", "a reduced head", "both its own"],
)
def test_what_a_drafter_has_itself_is_told(tmp_path: Path, fields: dict[str, Any], words: str):
    target, drafter = saved_pair("qwen3", tmp_path, **fields)
    result = inspect(drafter, "--target", target)
    assert result.exit_code == 0, result.output
    assert f"drafts with {words}\n" in "\n".join(" ".join(line.split()) for line in result.stdout.splitlines())


def test_a_treeflash_drafter(tmp_path: Path):
    target = models.build("qwen3")
    target.save_pretrained(tmp_path / "target")
    TreeFlashDrafter.from_dflash(drafter_for(target)).save_pretrained(tmp_path / "drafter")
    found = inspect_drafter(str(tmp_path / "drafter"), str(tmp_path / "target"))
    assert (found.verdict, found.family) == ("fits", "TreeFlashDrafter")


def test_a_drafter_without_attention_of_its_own(tmp_path: Path):
    target = models.build("llama")
    target.save_pretrained(tmp_path / "target")
    drafter = FlexDraftDrafter.from_target(target, 2, block_size=4, calibration_rank=5)
    drafter.save_pretrained(tmp_path / "drafter")
    result = inspect(str(tmp_path / "drafter"), "--target", str(tmp_path / "target"))
    assert result.exit_code == 0, result.output
    assert ": fits\n" in result.stdout
    words = " ".join(result.stdout.split())
    assert "drafts in ··●● 2, 3 of 4" in words
    assert "looks back" not in words
    other = models.build("llama", num_attention_heads=2)
    other.save_pretrained(tmp_path / "other")
    assert inspect(str(tmp_path / "drafter"), "--target", str(tmp_path / "other")).exit_code == 1


def test_a_published_dialect(paths: tuple[str, str], tmp_path: Path):
    zlab = {
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 2]},
        "rope_parameters": ...,
        "rope_theta": 10_000.0,
    }
    found = inspect_drafter(edited(paths[1], tmp_path / "drafter", **zlab), paths[0])
    assert (found.verdict, found.dialect) == ("fits", "DFlashDraftModel (qwen3)")
    lost = edited(paths[1], tmp_path / "lost", **{**zlab, "rope_theta": ...})
    found = inspect_drafter(lost, paths[0])
    assert (found.verdict, found.dialect) == ("does not load", "DFlashDraftModel (qwen3)")
    assert "states no rope_theta" in found.findings[0].found


@pytest.mark.parametrize(
    ("card", "origin"),
    [
        (CARD.format(licence="mit", base="Qwen/Qwen3-4B"), ("mit", "Qwen/Qwen3-4B")),
        (CARD.format(licence="mit", base="[a/one, a/two]"), ("mit", "a/one, a/two")),
        ("---\nlicense: other\nlicense_name: Its-Own\n---\n", ("its-own", None)),
        ("# No metadata\n", (None, None)),
        ("---\nlicense: [mit\n---\n", (None, None)),
    ],
    ids=["stated", "two bases", "a licence of its own", "no metadata", "unreadable"],
)
def test_the_card_says_licence_and_base(
    paths: tuple[str, str], tmp_path: Path, card: str, origin: tuple[str | None, str | None]
):
    drafter = edited(paths[1], tmp_path / "drafter")
    (tmp_path / "drafter" / "README.md").write_text(card)
    assert tuple(inspect_drafter(drafter).origin.values()) == origin


def test_the_configuration_knows_the_trained_target_better_than_the_card(paths: tuple[str, str], tmp_path: Path):
    drafter = edited(paths[1], tmp_path / "drafter", target_name_or_path="Qwen/Qwen3-8B")
    (tmp_path / "drafter" / "README.md").write_text(CARD.format(licence="mit", base="Qwen/Qwen3-4B"))
    result = inspect(drafter)
    assert "trained for  Qwen/Qwen3-8B" in result.stdout
    assert "licence      mit" in result.stdout


@pytest.mark.parametrize("family", ["dflash", "treeflash"])
def test_the_embedded_pair(family: str):
    found = inspect_drafter(f"embedded:{family}", "embedded", weights=True)
    assert found.verdict == "fits"
    assert found.origin == {"licence": "apache-2.0", "trained_for": "embedded"}
    assert statuses(found)["mask and tokenizer"] == "fits"


def test_a_mask_that_texts_contain_is_told(paths: tuple[str, str], tmp_path: Path):
    drafter = edited(paths[1], tmp_path / "drafter", mask_token_id=40)
    found = inspect_drafter(drafter, paths[0])
    assert found.verdict == "fits with warnings"
    (finding,) = [finding for finding in found.findings if finding.rule == "mask and tokenizer"]
    assert finding.status == "slow"
    assert finding.found.startswith("mask_token_id 40 is '")
    assert "a token of ordinary text" in finding.found


def test_a_tokenizer_that_does_not_load_is_told(paths: tuple[str, str], tmp_path: Path):
    target = edited(paths[0], tmp_path / "target")
    for file in (tmp_path / "target").glob("tokenizer*"):
        file.write_text("{")
    found = inspect_drafter(paths[1], target)
    assert statuses(found)["mask and tokenizer"] == "not checked"
    assert found.verdict == "fits"


def test_layers_are_drawn():
    assert draw_layers([1, 4], 6) == "·●··●· 1, 4 of 6"
    assert draw_layers([1, 4], None) == "1, 4"
