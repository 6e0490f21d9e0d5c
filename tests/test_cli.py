"""The command line, in process, on a tiny random pair."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
import typer
from click.testing import Result
from pairs import PROMPT, Pair, build_pair, save_pair
from typer.testing import CliRunner

import hf_treespec
from hf_treespec import embedded
from hf_treespec.cli import app
from hf_treespec.drafters.auto import AutoDrafter
from hf_treespec.drafters.dflash import DFlashDrafter
from hf_treespec.drafters.treeflash import TreeFlashDrafter
from hf_treespec.evaluation import demo, held_out
from hf_treespec.evaluation.arms import ARMS
from hf_treespec.evaluation.benchmark import Benchmark
from hf_treespec.evaluation.prompt_sets import available_sets
from hf_treespec.evaluation.timing import timed_generate
from hf_treespec.training.commands import load_init

runner = CliRunner()


@pytest.fixture(scope="module")
def pair() -> Pair:
    return build_pair()


@pytest.fixture(scope="module")
def paths(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(pair, tmp_path_factory.mktemp("pair"))


@pytest.fixture
def tampered(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assisted calls end on another token than plain ones."""
    kind = type(pair[0])
    original = kind.generate

    def generate(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        if getattr(kwargs.get("assistant_model"), "last_report", None) is not None:
            output[:, -1] = (output[:, -1] + 1) % 300
        return output

    monkeypatch.setattr(kind, "generate", generate)


def commands(group: click.Command, name: str = "hf-treespec") -> Iterator[tuple[str, click.Command]]:
    for child_name, child in getattr(group, "commands", {}).items():
        yield f"{name} {child_name}", child
        yield from commands(child, f"{name} {child_name}")


def test_version():
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.strip() == hf_treespec.__version__


def test_everything_is_documented():
    found = dict(commands(typer.main.get_command(app)))
    assert {
        "hf-treespec demo",
        "hf-treespec generate",
        "hf-treespec verify",
        "hf-treespec bench",
        "hf-treespec train dflash",
        "hf-treespec train treeflash",
        "hf-treespec train flexdraft",
    } <= set(found)
    for name, command in found.items():
        assert command.help, name
        for parameter in command.params:
            if parameter.name != "help":
                assert getattr(parameter, "help", None), f"{name} {parameter.name}"
        assert runner.invoke(app, [*name.split()[1:], "--help"]).exit_code == 0


def test_an_option_of_several_commands_means_one_thing():
    helps: dict[str, set[str]] = {}
    for _, command in commands(typer.main.get_command(app)):
        for parameter in command.params:
            if parameter.opts[0].startswith("--"):
                helps.setdefault(parameter.opts[0], set()).add(getattr(parameter, "help", None) or "")
    shared = {"--drafter", "--beside", "--chat", "--device", "--seed", "--budget", "--shape", "--depth", "--top-k"}
    shared |= {"--json", "--plots", "--prompt-length", "--new-tokens", "--max-new-tokens", "--steps", "--batch-size"}
    assert {name: texts for name, texts in helps.items() if name in shared and len(texts) > 1} == {}
    assert shared <= helps.keys()


def test_generate_streams_what_plain_decoding_writes(pair: Pair, paths: tuple[str, str]):
    target, _, tokenizer = pair
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = target.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=20, do_sample=False
    )
    expected = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    for arguments, stdin in ((["--prompt", PROMPT], None), ([], PROMPT)):
        result = runner.invoke(app, ["generate", *paths, "--max-new-tokens", "20", *arguments], input=stdin)
        assert result.exit_code == 0, result.output
        assert result.stdout.rstrip("\n") == expected.rstrip("\n")
        assert "20 tokens in" in result.stderr


def test_generate_samples_by_seed(paths: tuple[str, str]):
    def write(seed: int) -> str:
        sampling = ["--temperature", "1.0", "--top-p", "0.95", "--seed", str(seed), "--max-new-tokens", "24"]
        return runner.invoke(app, ["generate", *paths, "-p", PROMPT, "--no-report", *sampling]).stdout

    assert write(0) == write(0)
    assert write(0) != write(1)


def test_generate_takes_options(paths: tuple[str, str]):
    arguments = ["generate", *paths, "-p", PROMPT, "--max-new-tokens", "8", "--budget", "3", "--shape", "chain"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "3.0 nodes" in result.stderr or "2." in result.stderr


def test_verify_passes(paths: tuple[str, str]):
    result = runner.invoke(app, ["verify", *paths, "-p", PROMPT, "-p", "x = [1]", "--max-new-tokens", "16"])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("identical") == 4
    assert "[1]" in result.stdout


@pytest.mark.usefixtures("tampered")
def test_verify_tells_a_bug(paths: tuple[str, str]):
    arguments = ["verify", *paths, "-p", PROMPT, "--max-new-tokens", "16"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1
    assert "identical" not in result.stdout
    assert result.stdout.count("first difference at new token 15") == 2
    assert result.stdout.count("bug") == 2


@pytest.mark.usefixtures("tampered")
def test_verify_passes_with_ties(paths: tuple[str, str]):
    result = runner.invoke(app, ["verify", *paths, "-p", PROMPT, "--max-new-tokens", "4", "--tolerance", "1e9"])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("tie\n") == 2


@pytest.mark.parametrize("command", ["generate", "verify"])
def test_what_cannot_be_loaded_is_said_in_a_line(command: str, tmp_path: Path, paths: tuple[str, str]):
    for pair in ((str(tmp_path / "nothing"), paths[1]), (paths[0], paths[0]), ("embedded", paths[1])):
        result = runner.invoke(app, [command, *pair, "-p", PROMPT])
        assert result.exit_code == 2
        assert result.stderr.startswith("Error: ")


class TestDemo:
    arguments = ("demo", "--repeats", "2", "--prompts", "2", "--max-new-tokens", "8", "--show", "1", "--threads", "1")

    @pytest.fixture(autouse=True)
    def _tiny(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(embedded, "load", lambda *args, **kwargs: pair)

    def test_results(self, tmp_path: Path):
        file = tmp_path / "demo.json"
        result = runner.invoke(app, [*self.arguments, "--json", str(file)])
        assert result.exit_code == 0, result.output
        assert "argparse script" in result.stdout
        assert "draft tree" in result.stdout
        found = json.loads(file.read_text())
        pooled = {
            "identical",
            "speedup",
            "acceptance_length",
            "tokens_per_second",
            "plain_tokens_per_second",
            "lookup_speedup",
            "stage_ms",
        }
        for section in (found, found["greedy"]):
            assert pooled <= section["pooled"].keys()
            assert section["pooled"]["identical"] is True
            assert section["pooled"]["speedup"] > 0
            assert len(section["prompts"]) == 2
            for prompt in section["prompts"]:
                assert pooled | {"repeated_4grams"} <= prompt.keys()
        assert set(found["pooled"]["stage_ms"]) == {"propose", "expand", "verify", "walk", "commit", "other"}
        assert torch.get_num_threads() == 1

    def test_warnings_are_told_once_for_each_arm(self, monkeypatch: pytest.MonkeyPatch):
        def generate(target, inputs, *, seed, **options):
            if options.get("assistant_model") is not None:
                logging.getLogger("hf_treespec.decoding").warning(f"Drafting costs {seed} ms.")
            return timed_generate(target, inputs, seed=seed, **options)

        monkeypatch.setattr(demo, "timed_generate", generate)
        result = runner.invoke(app, [*self.arguments, "--show", "0"])
        assert result.exit_code == 0, result.output
        # Two prompts, two repeats of each and a warm-up, in two regimes.
        told = re.findall(r"(draft \w+): Drafting costs \d+ ms\. The last of 10 such", " ".join(result.stdout.split()))
        assert told == ["draft tree", "draft chain"]
        assert "Drafting costs" not in result.stderr

    def test_no_more_threads_than_cores(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(demo, "usable_cores", lambda: 1)
        file = tmp_path / "demo.json"
        short = ["demo", "--repeats", "1", "--prompts", "1", "--max-new-tokens", "2", "--show", "0"]
        result = runner.invoke(app, [*short, "--threads", "2", "--json", str(file)])
        assert result.exit_code == 0, result.output
        assert "Of 2 threads only 1 can run at once here: computing with 1." in result.stdout
        assert json.loads(file.read_text())["environment"]["threads"] == 1
        assert "threads only" not in runner.invoke(app, [*short, "--threads", "1"]).stdout

    @pytest.mark.usefixtures("tampered")
    def test_a_difference_fails(self):
        result = runner.invoke(app, self.arguments)
        assert result.exit_code == 1
        assert "no" in result.stdout


def test_demo_without_the_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(embedded, "_FOLDER", tmp_path)
    result = runner.invoke(app, ["demo"])
    assert result.exit_code == 2
    assert "`target` is not in this installation" in result.stderr


def test_the_demo_names_the_families_there_are():
    result = runner.invoke(app, ["demo", "--family", "nothing"])
    assert result.exit_code == 2
    assert "There is no embedded model `nothing`; there are dflash," in result.stderr


class TestBench:
    arguments = ("bench", "--quick", "--prompts", "2", "--repeats", "1", "--max-new-tokens", "8")

    @pytest.fixture(autouse=True)
    def _tiny(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(embedded, "load", lambda *args, **kwargs: pair)

    def test_results(self, tmp_path: Path):
        file, table = tmp_path / "bench.json", tmp_path / "bench.csv"
        arguments = [*self.arguments, "--json", str(file), "--csv", str(table), "--batch-sweep", "1,2"]
        result = runner.invoke(app, [*arguments, "--arms", "chain, tree-4,treeflash-4"])
        assert result.exit_code == 0, result.output
        assert "stdlib-functions, 2 prompts" in result.stdout
        assert "treeflash-4 skipped: needs a treeflash drafter" in result.stdout
        found = json.loads(file.read_text())
        assert [section["dataset"] for section in found["datasets"]] == list(held_out.SLICES)
        assert [section["batch"] for section in found["batches"]] == [1, 2]
        for section in (*found["datasets"], *found["batches"]):
            rows = {row["arm"]: row for row in section["arms"]}
            assert list(rows) == ["plain", "chain", "tree-4", "treeflash-4"]
            assert rows["tree-4"]["greedy_match"] == 1.0
            assert rows["treeflash-4"]["skipped"]
        assert found["environment"]["target"] == found["environment"]["drafter"] == "embedded"
        assert found["environment"]["max_new_tokens"] == 8
        assert len(table.read_text().splitlines()) == 1 + 5 * 4

    def test_a_file_of_prompts(self, tmp_path: Path, paths: tuple[str, str]):
        data, file = tmp_path / "mine.jsonl", tmp_path / "bench.json"
        data.write_text(json.dumps({"turns": [PROMPT, "more"]}) + "\n")
        pair = ["--target", paths[0], "--drafter", paths[1]]
        further = ["--beside", f"again={paths[1]}", "--arms", "chain,chain@again"]
        arguments = [*self.arguments, *pair, *further, "--json", str(file), "--data", str(data), "--ignore-eos"]
        result = runner.invoke(app, arguments)
        assert result.exit_code == 0, result.output
        report = json.loads(file.read_text())
        assert report["environment"]["beside"] == {"again": paths[1]}
        (section,) = report["datasets"]
        first, again = section["arms"][1:]
        assert again["arm"] == "chain@again"
        assert again["acceptance_length"] == first["acceptance_length"]
        assert (section["dataset"], section["prompts"], section["requests"], section["tokens"]) == ("mine", 1, 2, 16)
        result = runner.invoke(app, [*self.arguments, *pair])
        assert result.exit_code == 2
        assert "--data" in result.stderr

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--arms", "tree-4,nothing"], "Unknown arm 'nothing'"),
            (["--data", "nothing"], "No prompts named 'nothing'"),
            (["--batch-sweep", "1,x"], "--batch-sweep"),
            (["--batch-sweep", "0"], "--batch-sweep"),
            (["--beside", "embedded:treeflash"], "NAME=DRAFTER"),
            (["--arms", "chain@tf"], "no drafter given"),
        ],
    )
    def test_what_cannot_be_measured_is_refused(self, arguments: list[str], message: str):
        result = runner.invoke(app, [*self.arguments, *arguments])
        assert result.exit_code == 2
        assert message in result.stderr

    @pytest.mark.usefixtures("tampered")
    def test_a_difference_fails(self):
        result = runner.invoke(app, [*self.arguments, "--arms", "chain", "--data", "stdlib-tests"])
        assert result.exit_code == 1
        assert "differs from plain decoding" in result.stdout

    def test_an_interrupt_reports(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        def interrupt(*args: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Benchmark, "_measure_batches", interrupt)
        file = tmp_path / "bench.json"
        arguments = [*self.arguments, "--arms", "chain", "--data", "stdlib-tests", "--batch-sweep", "2"]
        result = runner.invoke(app, [*arguments, "--json", str(file)])
        assert result.exit_code == 130
        assert "Interrupted" in result.stdout
        found = json.loads(file.read_text())
        assert found["partial"] is True
        assert found["datasets"][0]["arms"][1]["speedup"] > 0
        assert found["batches"][0]["arms"][1]["skipped"] == "nothing was measured"

    def test_help_names_every_arm_and_prompt_set(self):
        text = " ".join(runner.invoke(app, ["bench", "--help"], env={"COLUMNS": "400"}).stdout.split())
        assert all(name in text for name in (*ARMS, *available_sets()))


def test_distribution(paths: tuple[str, str], tmp_path: Path):
    pytest.importorskip("matplotlib")
    data, report, figures = tmp_path / "prompts.jsonl", tmp_path / "report.json", tmp_path / "figures"
    data.write_text("".join(json.dumps({"turns": [PROMPT * 4]}) + "\n" for _ in range(3)))
    further = ["--beside", f"again={paths[1]}"]
    options = {"--prompts": 2, "--prompt-length": 8, "--new-tokens": 16, "--nodes": 8, "--stride": 2}
    arguments = ["--target", paths[0], "--drafter", paths[1], "--data", str(data)]
    arguments += [*further, "--json", str(report), "--plots", str(figures)]
    arguments += [str(part) for option in options.items() for part in option]
    result = runner.invoke(app, ["distribution", *arguments])
    assert result.exit_code == 0, result.output
    assert "Best children in trees of 8 nodes" in result.stdout
    drafters = json.loads(report.read_text())["drafters"]
    assert list(drafters) == [paths[1], "again"]
    found = drafters[paths[1]]
    assert drafters["again"] == found
    assert found["child_accuracy"]["on_spine"]["events"] > 0
    assert {path.name for path in figures.iterdir()} == {"distance.png", "coverage.png", "children.png"}
    too_long = runner.invoke(app, ["distribution", *arguments, "--prompt-length", "999"])
    assert too_long.exit_code == 2
    assert "no prompt has 999 tokens" in too_long.stderr


class TestTraining:
    small = (
        ("--sequences", 4),
        ("--held-out-sequences", 2),
        ("--prompt-length", 8),
        ("--new-tokens", 24),
        ("--steps", 2),
        ("--batch-size", 2),
        ("--anchors", 4),
        ("--save-steps", 2),
    )

    def train(self, family: str, target: str, output: Path, data: Path, *options: object) -> Result:
        given = [str(part) for option in self.small for part in option]
        arguments = ["train", family, "--target", target, "--output", str(output), "--data", str(data), *given]
        return runner.invoke(app, [*arguments, *map(str, options)])

    @pytest.fixture
    def texts(self, tmp_path: Path) -> Path:
        path = tmp_path / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": PROMPT * 20}) + "\n" for _ in range(20)))
        return path

    def test_dflash(self, paths: tuple[str, str], texts: Path, tmp_path: Path):
        output = tmp_path / "drafter"
        result = self.train("dflash", paths[0], output, texts, "--layers", 1, "--block-size", 4)
        assert result.exit_code == 0, result.output
        assert "eval_tau_tree_16: " in result.stdout
        assert AutoDrafter.from_pretrained(output).config.block_size == 4
        assert runner.invoke(app, ["verify", paths[0], str(output), "-p", PROMPT]).exit_code == 0

    def test_a_target_that_is_nowhere(self, texts: Path, tmp_path: Path):
        result = self.train("dflash", "./no/such/target", tmp_path / "drafter", texts)
        assert result.exit_code != 0
        assert "There is no folder './no/such/target'" in " ".join(result.stderr.split())

    def test_embedded_drafters_are_told_apart(self):
        target, _, _ = embedded.load()
        assert type(load_init("embedded", target)) is DFlashDrafter
        assert type(load_init("embedded:treeflash", target)) is TreeFlashDrafter

    def test_treeflash(self, paths: tuple[str, str], tmp_path: Path):
        chats = tmp_path / "chats.jsonl"
        lines = (json.dumps({"turns": [f"{PROMPT} # {number}", "go on"]}) for number in range(40))
        chats.write_text("\n".join(lines))
        output = tmp_path / "drafter"
        result = self.train("treeflash", paths[0], output, chats, "--init", paths[1], "--loss", "ce")
        assert result.exit_code == 0, result.output
        assert "eval_tvd: " in result.stdout
        trained = AutoDrafter.from_pretrained(output)
        assert type(trained).__name__ == "TreeFlashDrafter"
        log = json.loads((output / "training_log.json").read_text())
        assert log["settings"]["loss"] == "ce"
        assert log["metrics"]["eval_tau_chain"] >= 1
        assert any("eval_tau_chain" in entry for entry in log["history"])
        card = (output / "README.md").read_text()
        assert card.startswith("---\nlibrary_name: hf_treespec\n")
        assert f"{log['metrics']['eval_tau_chain']:.4g}" in card
        assert "chats.jsonl" in card
        shards = {path: path.stat().st_mtime_ns for path in (output / "continuations").rglob("*.npy")}
        again = self.train("treeflash", paths[0], output, chats, "--init", paths[1], "--loss", "ce")
        assert again.exit_code == 0, again.output
        assert {path: path.stat().st_mtime_ns for path in (output / "continuations").rglob("*.npy")} == shards
        retrained = AutoDrafter.from_pretrained(output).state_dict()
        assert all(torch.equal(tensor, retrained[name]) for name, tensor in trained.state_dict().items())

    def test_flexdraft(self, paths: tuple[str, str], texts: Path, tmp_path: Path):
        output = tmp_path / "drafter"
        options = ("--layers", 2, "--block-size", 4, "--calibration-rank", 4)
        result = self.train("flexdraft", paths[0], output, texts, *options)
        assert result.exit_code == 0, result.output
        assert "eval_attention_tau_chain: " in result.stdout
        trained = AutoDrafter.from_pretrained(output)
        assert trained.config.target_layer_ids == [2, 3]
        log = json.loads((output / "training_log.json").read_text())
        assert sum("eval_tau_chain" in entry for entry in log["history"]) == 2
        assert "before the calibration" in (output / "README.md").read_text()
        assert runner.invoke(app, ["verify", paths[0], str(output), "-p", PROMPT]).exit_code == 0
        other = self.train("flexdraft", paths[0], tmp_path / "other", texts, "--init", paths[1])
        assert other.exit_code != 0
        assert "is a DFlashDrafter" in " ".join(other.stderr.split())

    def test_what_is_missing_is_said_in_a_line(self, paths: tuple[str, str], tmp_path: Path):
        result = runner.invoke(app, ["train", "treeflash", "--target", paths[0], "--output", str(tmp_path / "x")])
        assert result.exit_code == 2
        assert result.stderr.startswith("Error: ")
        result = self.train("treeflash", paths[0], tmp_path / "x", tmp_path / "nothing.txt", "--init", paths[1])
        assert result.exit_code == 2
        assert "--data" in result.stderr
        short = tmp_path / "short.txt"
        short.write_text("x")
        result = self.train("treeflash", paths[0], tmp_path / "x", short, "--init", paths[1])
        assert result.exit_code == 2
        assert "too few" in result.stderr
