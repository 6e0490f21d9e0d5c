"""Generates with the drafter in this repository: the same tokens as without it, sooner.

    target.generate(**inputs, custom_generate="{{ repo_id }}", trust_remote_code=True)

The work is done by the package hf_treespec, which must be installed.
"""

from typing import Any

try:
    from hf_treespec.hub.custom_generate import generate_with
except ImportError as error:
    raise ImportError(
        "The drafter {{ repo_id }} needs the package hf_treespec. Install it: pip install 'hf-treespec>={{ version }}'"
    ) from error


def generate(model: Any, **arguments: Any) -> Any:
    """`model.generate(**arguments)`, with this repository's drafter as assistant."""
    return generate_with("{{ repo_id }}", model, **arguments)
