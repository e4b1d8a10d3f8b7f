"""A chat's turns: each computes what is new alone, to the bit as from scratch; what is thought is told apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import SamplingParams
from penstock.cli.chat import Chat
from penstock.cli.streaming import Voice
from penstock.serve.conversation import Conversation
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.tools.reading import Reading
from penstock.spec.ask import Ask
from tests.cpu.engines import MACHINE as ENGINE_MACHINE
from tests.cpu.engines import make_model

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"
STRIPS = TEMPLATE.replace("m.content", "m.content | trim | upper")
TURNS = 20
