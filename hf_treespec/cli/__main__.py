"""`python -m hf_treespec.cli`."""

from . import main

main()
