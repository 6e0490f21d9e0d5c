"""What is refused before anything is published, each with the rule, the value and the fix."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from published import REPO, TARGET, measurement, saved

from hf_treespec.hub import write_repository
from hf_treespec.hub.licenses import TERMS, choose_license
from hf_treespec.hub.publishing import check_repo_id


def write(folder: Path, **options: Any) -> Any:
    drafter = options.pop("drafter", None) or saved(folder / "drafter")
    options = {"measurement": measurement(), "license": "apache-2.0", **options}
    return write_repository(drafter, options.pop("repo_id", REPO), folder / "out", **options)


def refused(folder: Path, *said: str, **options: Any) -> None:
    """Refused with a `ValueError` that says all that, and nothing is left behind."""
    pattern = ".*".join(map(re.escape, said))
    with pytest.raises(ValueError, match=pattern):
        write(folder, **options)
    assert not (folder / "out").exists()


@pytest.mark.parametrize(("value", "name"), [(float("nan"), "NaN"), (float("inf"), "infinite")])
def test_weights_that_are_no_numbers(tmp_path: Path, value: float, name: str):
    drafter = saved(tmp_path / "drafter")
    drafter.get_parameter("norm.weight").data[3] = value
    refused(tmp_path, "1 of 64 in norm.weight", name, "earlier checkpoint", drafter=drafter)


def test_an_adapter_round_the_drafter(tmp_path: Path):
    adapted = get_peft_model(saved(tmp_path / "drafter"), LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(TypeError, match=r"PeftModel around a DFlashDrafter.*merge_and_unload"):
        write(tmp_path, drafter=adapted)
    refused(tmp_path, "round layers of the drafter", "merge_and_unload", drafter=adapted.get_base_model())
    assert write(tmp_path, drafter=adapted.merge_and_unload())


def test_a_card_of_its_own_that_does_not_name_its_licence(tmp_path: Path):
    drafter = saved(tmp_path / "drafter")
    (tmp_path / "drafter" / "README.md").write_text("---\nlicense: other\n---\n")
    refused(tmp_path, "`license: other` without a license_name", "license_name and license_link", drafter=drafter)


def test_a_licence_of_ones_own_without_an_address(tmp_path: Path):
    refused(tmp_path, "(house) needs a license_link", "README.md", license="house")


def test_no_measurement(tmp_path: Path):
    refused(tmp_path, "with a measurement", "hf-treespec bench", measurement=None)


def test_a_measurement_that_is_nowhere(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"There is no measurement.*bench"):
        write(tmp_path, measurement=tmp_path / "none.json")


def test_a_file_that_is_no_measurement(tmp_path: Path):
    path = tmp_path / "bench.json"
    path.write_text("{")
    refused(tmp_path, "is no JSON", "hf-treespec bench", measurement=path)
    path.write_text(json.dumps({"pooled": {}}))
    refused(tmp_path, "this is not", "hf-treespec bench", measurement=path)


def test_a_measurement_without_its_command(tmp_path: Path):
    refused(tmp_path, "does not say its command", "Make a new one", measurement=measurement(command=None))


def test_an_interrupted_measurement(tmp_path: Path):
    refused(tmp_path, "interrupted", measurement=measurement() | {"partial": True})


def test_a_measurement_of_plain_decoding_alone(tmp_path: Path):
    found = measurement()
    for section in found["datasets"]:
        section["arms"] = [arm for arm in section["arms"] if arm["arm"] == "plain"]
    refused(tmp_path, "no arm that used the drafter", measurement=found)


def test_a_measurement_of_what_was_beside_it(tmp_path: Path):
    found = measurement()
    for section in found["datasets"]:
        for arm in section["arms"]:
            arm["arm"] += "@another"
    refused(tmp_path, "no arm that used the drafter", measurement=found)


def test_a_measurement_of_other_weights(tmp_path: Path):
    drafter = saved(tmp_path / "drafter")
    next(drafter.parameters()).data += 1
    refused(tmp_path, "other weights", "'./drafter'", "Measure these", drafter=drafter)


def test_a_measurement_of_the_same_weights_in_another_format(tmp_path: Path):
    write(tmp_path, drafter=saved(tmp_path / "drafter").to(torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "value", "own"), [("block_size", 16, "this one's is 5"), ("drafter_family", "flexdraft", "'dflash'")]
)
def test_a_measurement_of_another_kind_of_drafter(tmp_path: Path, name: str, value: Any, own: str):
    refused(tmp_path, f"its {name} is {value!r}", own, measurement=measurement(**{name: value}))


def test_a_measurement_that_knows_its_drafter_by_name_only(tmp_path: Path):
    unnamed = {"drafter_fingerprint": None}
    refused(tmp_path, "it names './another'", measurement=measurement(drafter="./another", **unnamed))
    write(tmp_path, measurement=measurement(drafter="drafter", **unnamed))


def test_a_measurement_on_another_target(tmp_path: Path):
    refused(tmp_path, f"{TARGET!r}", "'acme/other'", "--target", measurement=measurement(), target="acme/other")


def test_a_target_measured_in_a_folder_of_its_name(tmp_path: Path):
    write(tmp_path, measurement=measurement(target="./models/target"), target=TARGET)


def test_a_target_that_is_not_on_the_hub(tmp_path: Path):
    refused(tmp_path, "'./models/target' is none", "--target", measurement=measurement(target="./models/target"))


def test_a_licence_that_is_not_known(tmp_path: Path):
    refused(tmp_path, "licence must be given", "none that could be read", "--license", license=None)


@pytest.mark.parametrize("repo_id", ["drafter", "a/b/c", "acme/dra fter", "acme/-drafter", "acme/drafter.git", ""])
def test_ids_that_no_repository_can_have(repo_id: str):
    with pytest.raises(ValueError, match=r"owner"):
        check_repo_id(repo_id)


def test_a_folder_with_something_in_it(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    with pytest.raises(ValueError, match=r"empty folder.*Give a new one"):
        write(tmp_path)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


# Licences


@pytest.mark.parametrize(
    ("base", "chosen", "name", "said"),
    [
        ("llama3.1", "apache-2.0", "Llama-x", "under llama3.1"),
        ("llama3.1", None, "x", "begin with 'Llama'"),
        ("llama3.3", "llama3.3", "my-Llama", "'Llama-my-Llama'"),
        ("llama3", None, "Llama-x", "begin with 'Llama-3'"),
        ("llama2", "mit", "x", "under llama2"),
        ("gemma", "apache-2.0", "x", "under gemma"),
        ("qwen-research", "apache-2.0", "x", "under qwen-research"),
        ("tongyi-qianwen", "mit", "x", "under tongyi-qianwen"),
        ("cc-by-nc-4.0", "apache-2.0", "x", "under cc-by-nc-4.0 or cc-by-nc-sa-4.0"),
        ("cc-by-sa-4.0", "apache-2.0", "x", "under cc-by-sa-4.0"),
        ("cc-by-nd-4.0", "cc-by-nd-4.0", "x", "lets none be published"),
        ("gpl-3.0", "mit", "x", "under gpl-3.0"),
        ("of-its-own", None, "x", "'of-its-own'"),
    ],
)
def test_what_a_licence_forbids(base: str, chosen: str | None, name: str, said: str):
    with pytest.raises(ValueError, match=re.escape(said)) as refusal:
        choose_license(chosen, {"acme/base": base}, f"acme/{name}")
    assert "acme/base" in str(refusal.value)
    if base in TERMS:
        assert TERMS[base].source in str(refusal.value)


@pytest.mark.parametrize(
    ("base", "chosen", "name", "licence", "notice"),
    [
        ("apache-2.0", None, "x", "apache-2.0", ""),
        ("apache-2.0", "MIT", "x", "mit", ""),
        ("mit", "cc-by-nc-4.0", "x", "cc-by-nc-4.0", ""),
        ("llama3.1", None, "Llama-x", "llama3.1", "Built with Llama."),
        ("llama3", "llama3", "Llama-3-x", "llama3", "Built with Meta Llama 3."),
        ("gemma", None, "x", "gemma", "Gemma Terms of Use"),
        ("qwen", "apache-2.0", "x", "apache-2.0", "Improved using Qwen."),
        ("cc-by-nc-4.0", "cc-by-nc-sa-4.0", "x", "cc-by-nc-sa-4.0", ""),
        ("of-its-own", "apache-2.0", "x", "apache-2.0", ""),
        (None, "apache-2.0", "x", "apache-2.0", ""),
    ],
)
def test_what_a_licence_allows(base: str | None, chosen: str | None, name: str, licence: str, notice: str):
    found, notices = choose_license(chosen, {"acme/base": base}, f"acme/{name}")
    assert found == licence
    assert notice in " ".join(notices)
    assert bool(notice) == bool(notices)


def test_a_drafters_own_licence_binds_as_well(tmp_path: Path):
    drafter = saved(tmp_path / "drafter")
    (tmp_path / "drafter" / "README.md").write_text("---\nlicense: cc-by-nc-sa-4.0\n---\n")
    refused(tmp_path, "the drafter's own card", "cc-by-nc-sa-4.0", drafter=drafter)
