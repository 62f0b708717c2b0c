"""Many prefixes of a text in one pass of a causal model: a tree of tokens, each of which sees its ancestors.

The scores of all prefixes of a text of n tokens would be n passes over n / 2 tokens each. A token's states depend only
on what stands before it, so prefixes share those of their common beginning. What follows a prefix alone, such as an
end-of-sequence token or the end of a chat template, is a branch; and so is a prefix whose last word splits into other
tokens than in the longer text. Positions are depths, so each score is the one of its text alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

NODES = 256
"""Tokens up to which a tree grows, or twice its longest text if that is more: attention costs their square."""

CELLS = 2**24
"""Entries of the mask of a pass, in float32 64 MiB, unless one tree has more."""


@dataclass
class TokenTree:
    """Texts that share their beginnings."""

    ids: list[int] = field(default_factory=list)
    """Token of each node, parents before children."""
    parents: list[int] = field(default_factory=list)
    """Number of each node's parent; −1 at the start of a text."""
    ends: list[int] = field(default_factory=list)
    """Number of the last node of each text."""
    known: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of the node of a parent and token."""

    def new(self, text: Sequence[int]) -> int:
        """Number of nodes that a text would add."""
        node = -1
        for place, token in enumerate(text):
            if (node := self.known.get((node, token), -2)) == -2:
                return len(text) - place
        return 0

    def add(self, text: Sequence[int]) -> None:
        """Add a text."""
        node = -1
        for token in text:
            child = self.known.setdefault((node, token), len(self.ids))
            if child == len(self.ids):
                self.ids.append(token)
                self.parents.append(node)
            node = child
        self.ends.append(node)


def grow(texts: Sequence[Sequence[int]]) -> list[TokenTree]:
    """Trees of texts, in their order, which should bring texts of one beginning together; none is empty."""
    trees: list[TokenTree] = []
    longest = 0
    for text in texts:
        longest = max(longest, len(text))
        if not trees or len(trees[-1].ids) + trees[-1].new(text) > max(NODES, 2 * longest):
            trees.append(TokenTree())
            longest = len(text)
        trees[-1].add(text)
    return trees


def tree_inputs(trees: Sequence[TokenTree], dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs of one pass: `input_ids` and `position_ids` `[tree, node]`, `attention_mask` `[tree, 1, node, node]`.

    The mask is added to the attention's logits: 0 at a node itself and its ancestors, the lowest number elsewhere.
    """
    width = max(len(tree.ids) for tree in trees)
    ids = torch.zeros(len(trees), width, dtype=torch.long)
    sees = torch.eye(width, dtype=torch.bool).repeat(len(trees), 1, 1)
    for number, tree in enumerate(trees):
        ids[number, : len(tree.ids)] = torch.tensor(tree.ids)
        for node, parent in enumerate(tree.parents):
            if parent >= 0:
                sees[number, node] |= sees[number, parent]
    mask = torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)
    return {"input_ids": ids, "position_ids": sees.sum(-1) - 1, "attention_mask": mask.unsqueeze(1)}


def batches(trees: Sequence[TokenTree], tokens: int) -> Iterator[list[TokenTree]]:
    """Trees for one pass each: one, or of at most `tokens` tokens and `CELLS` entries of the mask, with padding."""
    batch: list[TokenTree] = []
    for tree in trees:
        width = max(len(x.ids) for x in [*batch, tree])
        if batch and width * (len(batch) + 1) > min(tokens, CELLS / width):
            yield batch
            batch = []
        batch.append(tree)
    if batch:
        yield batch
