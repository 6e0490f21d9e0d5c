"""Drafters on the Hugging Face Hub: what is published, and what must be true of it."""

from .publishing import publish, write_repository

__all__ = ["publish", "write_repository"]
