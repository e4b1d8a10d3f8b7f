"""The text that the reference models learn: books cleaned and split, their tokenizer, and windows of tokens.

Shapes: N tokens of a stream, B windows, T positions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

HELD_OUT = 0.04  # of every book, its end: 130 thousand tokens of the books that tale-llama learnt
BOS, EOS = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID = 0, 1  # special tokens come first in the vocabulary, in the order in which the trainer is given them
NOT_SCORED = -100


@dataclass(frozen=True)
class Book:
    name: str
    title: str
    train: str
    held_out: str


GUTENBERG_START = re.compile(r"\A.*?\*\*\* ?START OF TH[^\n]*\*\*\*[^\n]*\n", re.DOTALL)
GUTENBERG_END = re.compile(r"\*\*\* ?END OF TH.*\Z", re.DOTALL)
PICTURE = re.compile(r"\[Illustration[^\]]*\]")
EMPHASIS = re.compile(r"(?<!\w)_([^_]{1,400})_(?!\w)")
TYPOGRAPHY = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "\ufeff": None})


def unwrap(paragraph: str) -> str:
    """One line of a paragraph that was broken at a right margin.

    Prose here is wrapped at 70 to 79 columns and verse runs to 44, so a paragraph is prose if no line but its last is
    under 50 and none is indented. That takes 98 % of the prose books' lines (of each, 94 % at least) and none of the
    plays'.
    """
    lines = paragraph.strip("\n").split("\n")
    wrapped = all(len(line) >= 50 for line in lines[:-1]) and not any(line[:1].isspace() for line in lines[1:])
    return " ".join(line.strip() for line in lines) if wrapped else "\n".join(line.rstrip() for line in lines)


def clean(raw: str) -> str:
    """The book itself: without Gutenberg's header and footer and marks of pictures and italics, its prose unwrapped.

    Typographic quotes and dashes become ASCII, as a third of the books have them already: one spelling of a word, not
    two.
    """
    text = raw.replace("\r\n", "\n").replace("\r", "\n")
    text = GUTENBERG_END.sub("", GUTENBERG_START.sub("", text))
    text = EMPHASIS.sub(r"\1", PICTURE.sub("", text)).translate(TYPOGRAPHY)
    return "\n\n".join(unwrap(paragraph) for paragraph in re.split(r"\n\s*?\n", text) if paragraph.strip()) + "\n"


def read_books(folder: Path) -> list[Book]:
    books = []
    for path in sorted(folder.glob("*.txt")):
        text = clean(path.read_bytes().decode("utf-8"))
        cut = text.find("\n\n", int(len(text) * (1 - HELD_OUT)))  # at the paragraph's end
        cut = len(text) if cut < 0 else cut + 2
        title = text.split("\n", 1)[0].strip().strip(":;,") if path.stem.startswith("pg") else path.stem
        books.append(Book(path.name, title, text[:cut], text[cut:]))
    if not books:
        raise SystemExit(f"no .txt files in {folder}: name the folder with --books")
    return books


def train_tokenizer(books: list[Book], vocab: int) -> Tokenizer:
    """Byte-level BPE: any text has tokens, and decoding gives its bytes back. Only training text is seen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((book.train for book in books), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, BOS_ID)]
    )
    size = tokenizer.get_vocab_size()
    if size != vocab:
        raise SystemExit(f"the text gives {size} tokens where the architecture wants {vocab}: it takes more text")
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """One stream [N] of documents, each between its bos and its eos."""
    ids = [token for document in tokenizer.encode_batch(texts) for token in [*document.ids, EOS_ID]]
    return torch.tensor(ids, dtype=torch.int64)


def windows(stream: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [B, T]: a window begins with bos, as every prompt does, and bos itself is never a target."""
    targets = stream[starts[:, None] + torch.arange(length)]  # [B, T]
    inputs = F.pad(targets[:, :-1], (1, 0), value=BOS_ID)  # [B, T]
    return inputs, targets.masked_fill(targets == BOS_ID, NOT_SCORED)
