"""The errors a user can meet. Every message says what, where, both values, and the remedy.

`assert` is kept for our own invariants: an AssertionError is always a bug of ours.
"""

from __future__ import annotations


class HeadstartError(Exception):
    """Base of every error that is the user's to mend; the commands print it without a traceback."""


class RecipeError(HeadstartError):
    """A recipe has an unknown key, contradictory keys, or a value out of range."""


class DataError(HeadstartError):
    """Conversations, templates or tokens cannot be turned into training rows."""


class FeatureError(HeadstartError):
    """A feature store is missing, half-written, corrupt, or does not belong to this recipe."""


class TargetError(HeadstartError):
    """A target model's files lack something a head must borrow, or belong to another target."""


class ExportError(HeadstartError):
    """An export lacks a tensor or a config field, or does not reproduce the trained module."""


class EngineError(HeadstartError):
    """vLLM (or another engine) could not be started or did not return what was asked for."""
