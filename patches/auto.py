"""Importing this module applies every patch: for worker extensions and other places that only import."""

from __future__ import annotations

from . import apply_all

APPLIED = apply_all()
