"""Names the files beside the weights that say how text becomes ids, and limits their sizes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SETTINGS = (TOKENIZER_CONFIG, "special_tokens_map.json", "generation_config.json", "config.json")
TEMPLATE = "chat_template.jinja"

# Tokenizers of 256 k entries have some 34 MB. The longest of fourteen templates of well-known models has 8 kB. None of
# these models has more than 2 templates.
MAX_TOKENIZER_BYTES, MAX_SETTINGS_BYTES, MAX_TEMPLATE_BYTES = 128_000_000, 16_000_000, 1_000_000
_MOST_TEMPLATES = 64


def template_files(folder: Path) -> dict[str, Path]:
    """Name → file of the templates that have files of their own. `default` is listed even where its file is missing."""
    more = islice(folder.glob("additional_chat_templates/*.jinja"), _MOST_TEMPLATES)
    return {"default": folder / TEMPLATE, **{path.stem: path for path in sorted(more)}}


def text_bytes(folder: Path) -> int:
    """Bytes of all these files together; of a file beyond its limit, the limit."""
    limits = {
        folder / TOKENIZER: MAX_TOKENIZER_BYTES,
        **{folder / name: MAX_SETTINGS_BYTES for name in SETTINGS},
        **dict.fromkeys(template_files(folder).values(), MAX_TEMPLATE_BYTES),
    }
    return sum(min(path.stat().st_size, limit) for path, limit in limits.items() if path.is_file())
