"""Measures a drafter and publishes it with what was measured.

    python examples/publish_drafter.py your/target path/to/drafter you/your-drafter --data prompts.jsonl

`--dry-run` writes the folder that would be uploaded and uploads nothing. The commands `hf-treespec bench` and
`hf-treespec publish` do the same in two steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from hf_treespec.evaluation.bench import run_bench
from hf_treespec.evaluation.benchmark import Settings
from hf_treespec.evaluation.loading import load_pair
from hf_treespec.hub import write_repository


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="Hub id of the target")
    parser.add_argument("drafter", help="folder of the drafter, such as `hf-treespec train` writes")
    parser.add_argument("repo_id", help="where to publish it: owner/name")
    parser.add_argument(
        "--data", nargs="+", required=True, help='JSONL of {"turns": [...]} lines, or gsm8k and others'
    )
    parser.add_argument("--prompts", type=int, default=16, help="prompts of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--work", type=Path, default=Path("publish"), help="folder for what is measured and written")
    parser.add_argument("--license", help="the drafter's licence; the target's own if not set")
    parser.add_argument("--private", action="store_true", help="publish it for yourself alone")
    parser.add_argument("--dry-run", action="store_true", help="upload nothing")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    measurement = arguments.work / "bench.json"
    pair = load_pair(arguments.target, arguments.drafter)
    run_bench(
        Console(),
        pair,
        data=arguments.data,
        arms=["chain", "auto"],
        settings=Settings(max_new_tokens=arguments.max_new_tokens),
        prompts=arguments.prompts,
        described={"target": arguments.target, "drafter": arguments.drafter, "temperature": 0.0},
        json_path=measurement,
    )
    drafter = pair[1]
    options = {"measurement": measurement, "target": arguments.target, "license": arguments.license}
    if arguments.dry_run:
        write_repository(drafter, arguments.repo_id, arguments.work / "repository", **options)
        print(f"written to {arguments.work / 'repository'}")
    else:
        print(drafter.push_to_hub(arguments.repo_id, private=arguments.private, **options).commit_url)


if __name__ == "__main__":
    main()
