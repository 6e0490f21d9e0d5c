"""Cards: one template, valid metadata, and what is kept when a card is written anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from published import REPO, TARGET, measurement, pair, saved

from hf_treespec import AutoDrafter, embedded
from hf_treespec.hub import cards, write_repository


def rendered(**options: Any) -> ModelCard:
    options = {"target": TARGET, "repo_id": REPO, "licence": "apache-2.0", "measurement": measurement(), **options}
    return cards.render_card(pair()[1], **options)


@pytest.mark.parametrize("family", ["dflash", "flexdraft", "treeflash"])
def test_the_embedded_drafters_cards_are_of_the_template(family: str, tmp_path: Path):
    folder = embedded.path(family)
    drafter, card = AutoDrafter.from_pretrained(folder, dtype="auto"), ModelCard.load(folder / "README.md")
    again = cards.render_card(
        drafter,
        target="embedded",
        licence=card.data.license,
        training=cards.training_section(card),
        metadata=card.data.to_dict(),
    )
    written = cards.write_card(again, tmp_path)
    assert written.read_text(encoding="utf-8") == (folder / "README.md").read_text(encoding="utf-8")


def test_a_card_without_a_measurement_says_so_and_is_not_publishable():
    card = rendered(measurement=None)
    assert "has not been measured" in card.text
    with pytest.raises(ValueError, match="model-index is missing"):
        cards.check_card(card)


def test_a_published_card_is_valid():
    card = rendered()
    assert "has not been measured" not in card.text
    cards.check_card(card)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("base_model", "a/b/c", "base_model is no id"),
        ("base_model", None, "base_model is missing"),
        ("base_model_relation", "drafter", "is none of adapter, finetune, merge, quantized"),
        ("license", "my-own", "none of the Hub's"),
        ("license", "other", "needs a license_name"),
        ("license", None, "license is missing"),
        ("tags", ["a", 1], "tags must be text"),
        ("favourite", "x", "'favourite' is no key"),
    ],
)
def test_metadata_that_the_hub_does_not_take(key: str, value: Any, said: str):
    card = rendered()
    card.data[key] = value
    with pytest.raises(ValueError, match=said):
        cards.check_card(card)


def test_an_other_licence_needs_a_link():
    card = rendered()
    card.data.license, card.data.license_name = "other", "house"
    with pytest.raises(ValueError, match=r"license `other` \(house\) needs a license_link"):
        cards.check_card(card)
    card.data.license_link = "https://acme/house"
    cards.check_card(card)


def test_a_name_of_a_dataset_that_the_hub_does_not_take():
    card = rendered()
    card.data.eval_results[0].dataset_type = "of my own"
    with pytest.raises(ValueError, match="'of my own' is no name"):
        cards.check_card(card)


def test_what_a_card_says_is_kept_when_it_is_published(tmp_path: Path):
    drafter = saved(tmp_path / "drafter")
    metadata = {"datasets": ["openai/gsm8k"], "language": "en", "tags": ["mine"]}
    card = rendered(measurement=None, training="- **Data**: its own.", metadata=metadata)
    cards.write_card(card, tmp_path / "drafter")
    published = write_repository(drafter, REPO, tmp_path / "out", measurement=measurement(), license="apache-2.0")
    assert cards.training_section(published) == "- **Data**: its own."
    assert published.data.datasets == ["openai/gsm8k"]
    assert published.data.language == "en"
    assert "mine" in published.data.tags
    assert str(ModelCard.load(tmp_path / "out" / "README.md")).rstrip() == str(published).rstrip()


def test_batches_and_what_differs_are_shown():
    found = measurement()
    (first, *_) = found["datasets"]
    chain = next(arm for arm in first["arms"] if arm["arm"] == "chain")
    found["batches"] = [{"batch": 4, "prompts": 2, "notes": ["A note."], "arms": [{**chain, "mismatches": 3}]}]
    text = rendered(measurement=found).text
    assert "Batches of 4, 2 prompts" in text
    assert "3 differ |" in text
    assert "A note." in text
