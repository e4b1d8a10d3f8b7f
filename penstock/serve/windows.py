"""Cuts a text into windows of 512 tokens that do not overlap: `eval`, `profile` and `train-predictors` read it so."""

from __future__ import annotations

from dataclasses import replace

from penstock.spec.ask import Ask
from penstock.spec.model import ModelSpec

WINDOW_TOKENS = 512


def width_of(*specs: ModelSpec) -> int:
    """Tokens of a window that all of these models have positions for."""
    return min([WINDOW_TOKENS, *(spec.max_positions for spec in specs)])


def in_windows(ask: Ask, *specs: ModelSpec) -> Ask:
    """The same ask for passes of one window of these models, and nothing after it."""
    width = width_of(*specs)
    return replace(ask, context=width, prompt_tokens=width, output_tokens=1)
