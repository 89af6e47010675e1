"""A CLIP tokenizer in which every word of the caption grammar is one token.

Other words fall apart into smaller pieces, down to single bytes, so nothing is unknown.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from config import MAX_TOKENS
from tomesd_demo_model.captions import COLORS, PATTERNS, objects

START, END = "<|startoftext|>", "<|endoftext|>"
_GRAMMAR = "a an and two three four on to of plain background , -"


def words() -> list[str]:
    """Every word a caption can hold, sorted."""
    names = [n for thing in objects() for n in (thing.name, thing.plural)]
    text = " ".join([*names, *COLORS, *PATTERNS, _GRAMMAR])
    return sorted(set(text.split()))


def build(folder: Path) -> None:
    """Write vocab.json, merges.txt and the two tokenizer configs transformers looks for."""
    alphabet = _byte_alphabet()
    vocabulary = [*alphabet, *(c + "</w>" for c in alphabet)]
    merges = _learn_merges(words())
    vocabulary += dict.fromkeys(left + right for left, right in merges)
    vocabulary += [START, END]
    folder.mkdir(parents=True, exist_ok=True)
    ids = {token: i for i, token in enumerate(vocabulary)}
    _write_json(folder / "vocab.json", ids)
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": END}
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "CLIPTokenizer", "model_max_length": MAX_TOKENS, **special},
    )
    _write_json(folder / "special_tokens_map.json", special)


class WordTokenizer:
    """Looks words of the grammar up: the same ids as CLIPTokenizer, without its dependencies."""

    def __init__(self, folder: Path) -> None:
        ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        self.size = len(ids)
        self.start, self.end = ids[START], ids[END]
        self.word_ids = {word: ids[word + "</w>"] for word in words()}

    def __call__(self, caption: str) -> list[int]:
        """Token ids padded with the end token to MAX_TOKENS."""
        found = [self.word_ids[w] for w in re.findall(r"[a-z]+|[,-]", caption)]
        tokens = [self.start, *found[: MAX_TOKENS - 2]]
        return tokens + [self.end] * (MAX_TOKENS - len(tokens))

    def batch(self, captions: list[str], device: torch.device | str) -> Tensor:
        """Token ids [B, MAX_TOKENS]."""
        return torch.tensor([self(caption) for caption in captions], device=device)


def _learn_merges(vocabulary: list[str]) -> list[tuple[str, str]]:
    """Byte-pair encoding carried on until every word is whole: the merges in learned order."""
    split = [[*word[:-1], word[-1] + "</w>"] for word in vocabulary]
    merges = []
    while any(len(pieces) > 1 for pieces in split):
        pairs = Counter(pair for pieces in split for pair in itertools.pairwise(pieces))
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        split = [_merge(pieces, best) for pieces in split]
    return merges


def _merge(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def _byte_alphabet() -> list[str]:
    """The 256 printable characters byte-level BPE stands bytes for (as in GPT-2 and CLIP)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(len(other))]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
