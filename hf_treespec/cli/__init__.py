"""The command line: `hf-treespec`, a module for each of its commands."""

from .app import app, main

__all__ = ["app", "main"]
