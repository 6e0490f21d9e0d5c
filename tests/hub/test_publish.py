"""Drafters published to a Hub on this machine, and read from it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, snapshot_download
from loopback import Fault, LoopbackHub
from pairs import PROMPT, save_pair
from published import REPO, TARGET, measurement, pair, saved
from typer.testing import CliRunner

from hf_treespec import AutoDrafter
from hf_treespec.cli import app
from hf_treespec.drafters.fingerprint import weights_fingerprint
from hf_treespec.hub import publish, write_repository

TOKEN = "hf_acme"
FILES = [
    "README.md",
    "config.json",
    "custom_generate/generate.py",
    "custom_generate/requirements.txt",
    "model.safetensors",
]


@pytest.fixture
def hub(hub: LoopbackHub, tmp_path: Path) -> LoopbackHub:
    """A Hub with the target."""
    save_pair(pair(), tmp_path)
    (tmp_path / "target" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    hub.create_from(TARGET, tmp_path / "target")
    return hub


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_published_is_what_is_loaded(hub: LoopbackHub, tmp_path: Path):
    drafter = saved(tmp_path / "drafter")
    commit = drafter.push_to_hub(REPO, measurement=measurement(), token=TOKEN, output=tmp_path / "out")
    assert sorted(hub.repositories[REPO].files) == FILES
    assert commit.oid == hub.repositories[REPO].refs["main"]
    assert not hub.repositories[REPO].private
    downloaded = Path(snapshot_download(REPO, cache_dir=tmp_path / "cache"))
    assert contents(downloaded) == contents(tmp_path / "out")
    loaded = AutoDrafter.from_pretrained(REPO, cache_dir=tmp_path / "cache")
    assert type(loaded) is type(drafter)
    assert weights_fingerprint(loaded) == weights_fingerprint(drafter)
    target, _, tokenizer = pair()
    inputs = tokenizer(PROMPT, return_tensors="pt")
    expected = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(**inputs, max_new_tokens=12, do_sample=False, assistant_model=loaded), expected)
    assert loaded.last_report.rounds


def test_the_card_on_the_hub(hub: LoopbackHub, tmp_path: Path):
    found = measurement()
    publish(saved(tmp_path / "drafter"), REPO, measurement=found, token=TOKEN, tags=["tiny"])
    card = ModelCard.load(REPO)
    data = card.data.to_dict()
    assert {key: data[key] for key in data if key != "model-index"} == {
        "base_model": TARGET,
        "base_model_relation": "adapter",
        "library_name": "hf_treespec",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["hf_treespec", "speculative-decoding", "dflash", "tiny"],
    }
    arms = {arm["arm"]: arm for arm in found["datasets"][0]["arms"]}
    best = max(arms["chain"], arms["tree-4"], key=lambda arm: arm["speedup"])
    results = {(result.dataset_type, result.metric_type): result for result in card.data.eval_results}
    assert {kind for kind, _ in results} == {"openai/gsm8k", "of-my-own"}
    speedup = results["openai/gsm8k", "speedup"]
    assert speedup.metric_value == round(best["speedup"], 3)
    assert (speedup.dataset_config, speedup.dataset_split) == ("main", "test")
    assert results["openai/gsm8k", "acceptance_length"].metric_value == round(best["acceptance_length"], 3)
    said = found["environment"]
    for name in ("hardware", "torch", "transformers", "hf_treespec", "command"):
        assert said[name] in card.text
    assert said["date"][:10] in card.text
    for arm in ("chain", "tree-4"):
        assert f"| `{arm}` | {arms[arm]['speedup']:.2f}× |" in card.text
        assert f"| {arms[arm]['acceptance_length']:.2f} |" in card.text
    assert "Prompts of one kind." in card.text
    assert f'AutoDrafter.from_pretrained("{REPO}"' in card.text


def test_a_dry_run_writes_what_would_be_uploaded(hub: LoopbackHub, tmp_path: Path):
    drafter = saved(tmp_path / "drafter")
    write_repository(drafter, REPO, tmp_path / "dry", measurement=measurement())
    assert hub.repositories.keys() == {TARGET}
    publish(drafter, REPO, measurement=measurement(), token=TOKEN)
    files = hub.repositories[REPO].files
    assert contents(tmp_path / "dry") == files


def test_a_new_version_leaves_no_old_weights(hub: LoopbackHub, tmp_path: Path):
    drafter = saved(tmp_path / "drafter")
    publish(drafter, REPO, measurement=measurement(), token=TOKEN, max_shard_size="40KB")
    assert sum(name.endswith(".safetensors") for name in hub.repositories[REPO].files) > 1
    publish(drafter, REPO, measurement=measurement(), token=TOKEN, commit_message="One file")
    assert sorted(hub.repositories[REPO].files) == FILES


def test_a_private_repository(hub: LoopbackHub, tmp_path: Path):
    publish(saved(tmp_path / "drafter"), REPO, measurement=measurement(), token=TOKEN, private=True)
    assert hub.repositories[REPO].private


def test_notices_go_along(hub: LoopbackHub, tmp_path: Path):
    hub.repositories[TARGET].commit({"README.md": b"---\nlicense: gemma\n---\n"})
    publish(saved(tmp_path / "drafter"), REPO, measurement=measurement(), token=TOKEN)
    files = hub.repositories[REPO].files
    assert b"Gemma Terms of Use" in files["NOTICE"]
    assert "Gemma Terms of Use" in ModelCard.load(REPO).text


def test_a_licence_of_another_name(hub: LoopbackHub, tmp_path: Path):
    terms = "license: other\nlicense_name: qwen-research\nlicense_link: https://acme/LICENSE"
    hub.repositories[TARGET].commit({"README.md": f"---\n{terms}\n---\n".encode()})
    publish(saved(tmp_path / "drafter"), REPO, measurement=measurement(), token=TOKEN)
    data = ModelCard.load(REPO).data
    assert (data.license, data.license_name) == ("other", "qwen-research")
    assert data.license_link == "https://acme/LICENSE"


@pytest.mark.parametrize(
    ("licence", "target", "own", "link"),
    [
        (
            None,
            "license_name: qwen-research\nlicense_link: LICENSE",
            "",
            f"https://huggingface.co/{TARGET}/blob/main/LICENSE",
        ),
        (None, "license_name: qwen-research", "", "https://huggingface.co/Qwen/Qwen2.5-3B/blob/main/LICENSE"),
        ("house", "", "license: other\nlicense_name: house\nlicense_link: https://acme/house", "https://acme/house"),
    ],
    ids=["a file of the target's", "a known licence", "the drafter's own"],
)
def test_a_licence_of_another_name_says_where_it_is(
    hub: LoopbackHub, tmp_path: Path, licence: str | None, target: str, own: str, link: str
):
    stated = f"license: other\n{target}" if target else "license: apache-2.0"
    hub.repositories[TARGET].commit({"README.md": f"---\n{stated}\n---\n".encode()})
    drafter = saved(tmp_path / "drafter")
    if own:
        (tmp_path / "drafter" / "README.md").write_text(f"---\n{own}\n---\n")
    publish(drafter, REPO, measurement=measurement(), token=TOKEN, license=licence)
    data = ModelCard.load(REPO).data
    assert (data.license, data.license_link) == ("other", link)


def test_a_pull_request_to_a_repository_of_somebody_else(hub: LoopbackHub, tmp_path: Path):
    drafter = saved(tmp_path / "drafter")
    hub.create(REPO, {"README.md": b"old", "model-00001-of-00002.safetensors": b"old"})
    kept = hub.repositories[REPO].refs["main"]
    commit = publish(drafter, REPO, measurement=measurement(), token="hf_guest", create_pr=True)
    assert commit.pr_revision == "refs/pr/1"
    assert commit.pr_url == f"{hub.endpoint}/{REPO}/discussions/1"
    repository = hub.repositories[REPO]
    assert repository.refs["main"] == kept
    assert sorted(repository.commits[repository.refs["refs/pr/1"]]) == FILES
    loaded = AutoDrafter.from_pretrained(REPO, revision="refs/pr/1", cache_dir=tmp_path / "cache")
    assert weights_fingerprint(loaded) == weights_fingerprint(drafter)


def test_a_branch_is_published_to_and_made_where_there_is_none(hub: LoopbackHub, tmp_path: Path):
    drafter = saved(tmp_path / "drafter")
    for _ in range(2):
        publish(drafter, REPO, measurement=measurement(), token=TOKEN, revision="tuned")
    repository = hub.repositories[REPO]
    assert sorted(repository.commits[repository.refs["tuned"]]) == FILES
    assert not repository.files.keys() & set(FILES)


# Refusals: nothing is created


def refused(hub: LoopbackHub, folder: Path, error: type[Exception], said: str, **options: Any) -> None:
    options = {"repo_id": REPO, "measurement": measurement(), "token": TOKEN, **options}
    with pytest.raises(error, match=said):
        publish(saved(folder / "drafter"), **options)
    assert hub.repositories.keys() == {TARGET}
    assert not hub.asked("POST", "/api/repos/create")


def test_nobody_logged_in(hub: LoopbackHub, tmp_path: Path):
    refused(hub, tmp_path, PermissionError, r"there is none.*hf auth login.*HF_TOKEN", token=None)


def test_a_token_the_hub_does_not_know(hub: LoopbackHub, tmp_path: Path):
    refused(hub, tmp_path, PermissionError, r"\(401\).*hf auth login", token="hf_wrong")


def test_a_token_that_may_only_read(hub: LoopbackHub, tmp_path: Path):
    refused(hub, tmp_path, PermissionError, r"may only read.*Make another", token="hf_reader")


def test_somebody_elses_namespace(hub: LoopbackHub, tmp_path: Path):
    refused(hub, tmp_path, PermissionError, r"'guest' may not write to 'acme'.*Publish under guest", token="hf_guest")


def test_a_hub_that_forbids_it_only_when_asked(hub: LoopbackHub, tmp_path: Path):
    hub.faults.append(Fault("/api/repos/create", method="POST", status=403))
    with pytest.raises(PermissionError, match=r"does not let the token write to 'acme/drafter' \(403\).*hf auth"):
        publish(saved(tmp_path / "drafter"), REPO, measurement=measurement(), token=TOKEN)
    assert hub.repositories.keys() == {TARGET}


def test_the_checks_of_a_dry_run_come_first(hub: LoopbackHub, tmp_path: Path):
    refused(hub, tmp_path, ValueError, "with a measurement", measurement=None)
    refused(hub, tmp_path, ValueError, "no repository id", repo_id="acme/dra fter")


def test_a_target_that_the_hub_does_not_know(hub: LoopbackHub, tmp_path: Path):
    found = measurement(target="acme/nowhere")
    refused(hub, tmp_path, ValueError, r"'acme/nowhere' is not on the Hub.*--target", measurement=found)


def test_a_licence_that_the_target_forbids(hub: LoopbackHub, tmp_path: Path):
    hub.repositories[TARGET].commit({"README.md": b"---\nlicense: llama3.1\n---\n"})
    refused(hub, tmp_path, ValueError, r"begin with 'Llama'.*'Llama-drafter'")


def test_a_card_that_the_hub_does_not_take(hub: LoopbackHub, tmp_path: Path):
    hub.faults.append(Fault("/api/validate-yaml", method="POST", status=400))
    refused(hub, tmp_path, ValueError, "Something went wrong here")


def test_offline(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(hub, tmp_path, ValueError, r"HF_HUB_OFFLINE forbids it.*--dry-run")


def test_saving_does_not_publish_on_the_side(hub: LoopbackHub, tmp_path: Path):
    drafter = saved(tmp_path / "drafter")
    with pytest.raises(ValueError, match=r"unchecked.*drafter\.push_to_hub"):
        drafter.save_pretrained(tmp_path / "again", push_to_hub=True, repo_id=REPO, token=TOKEN)
    with pytest.raises(ValueError, match="unchecked"):
        drafter.save_pretrained(tmp_path / "again", True, None, True)
    assert hub.repositories.keys() == {TARGET}


# The command


def test_the_command(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    saved(tmp_path / "drafter")
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(measurement()))
    arguments = ["publish", str(tmp_path / "drafter"), REPO, "--measurement", str(path)]
    dry = CliRunner().invoke(app, [*arguments, "--dry-run", "--output", str(tmp_path / "dry")])
    assert dry.exit_code == 0, dry.output
    assert hub.repositories.keys() == {TARGET}
    result = CliRunner().invoke(app, [*arguments, "--target", TARGET, "--private", "-m", "First"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"Published: {hub.endpoint}/{REPO}/commit/")
    assert hub.repositories[REPO].private
    assert hub.repositories[REPO].files == contents(tmp_path / "dry")


def test_the_command_refuses_in_a_line(hub: LoopbackHub, tmp_path: Path):
    result = CliRunner().invoke(app, ["publish", "embedded:treeflash", REPO])
    assert result.exit_code == 2
    assert "Error: Publishing needs a token" in result.stderr
    result = CliRunner().invoke(app, ["publish", "embedded", REPO, "--dry-run", "--output", str(tmp_path / "dry")])
    assert result.exit_code == 2
    assert "with a measurement" in result.stderr


# In the target's generate, by the repository's own code


def test_custom_generate(hub: LoopbackHub, tmp_path: Path, user_script: Any):
    publish(saved(tmp_path / "drafter"), REPO, measurement=measurement(), token=TOKEN)
    script = f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("{TARGET}")
inputs = AutoTokenizer.from_pretrained("{TARGET}")({PROMPT!r}, return_tensors="pt")
options = dict(max_new_tokens=12, do_sample=False)
plain = target.generate(**inputs, **options)
forwards = []
target.register_forward_hook(lambda *_: forwards.append(1))
for _ in range(2):
    found = target.generate(**inputs, **options, custom_generate="{REPO}", trust_remote_code=True)
    assert torch.equal(found, plain)
from hf_treespec.hub.custom_generate import _loaded
(_, drafter), = _loaded.values()
assert drafter.last_report.rounds, drafter.last_report
try:
    target.generate(**inputs, custom_generate="{REPO}", trust_remote_code=True, assistant_model=drafter)
except ValueError as error:
    assert "Leave one out" in str(error)
    print("same")
"""
    assert user_script(script).splitlines()[-1] == "same"
    assert len(hub.asked("GET", f"{REPO}/model.safetensors")) == 1


def test_custom_generate_says_what_it_needs(hub: LoopbackHub, tmp_path: Path, user_script: Any):
    write_repository(saved(tmp_path / "drafter"), REPO, tmp_path / "out", measurement=measurement())
    assert (tmp_path / "out" / "custom_generate" / "requirements.txt").read_text().startswith("hf-treespec>=")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path / "out" / "custom_generate")!r})
sys.modules["hf_treespec"] = None
try:
    import generate
except ImportError as error:
    print(error)
"""
    assert f"The drafter {REPO} needs the package hf_treespec. Install it: pip install" in user_script(script)
