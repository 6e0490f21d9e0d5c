"""`hf-treespec train`: a command for each family of drafters."""

from __future__ import annotations

import typer

from .dflash import dflash
from .flexdraft import flexdraft
from .treeflash import treeflash

train = typer.Typer(help="Train a drafter for a target.", no_args_is_help=True)
train.command()(dflash)
train.command()(treeflash)
train.command()(flexdraft)
