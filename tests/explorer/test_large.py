"""Long sequences: exact counts, small documents, and rules that Python evaluates in cells."""

import json

import numpy as np
import pytest

import longspan as ls
from longspan.explorer.document import document
from longspan.layout import count, plan_layout
from longspan.masks import Mask, rule
from tests.explorer.evaluator import ask, needs_node

pytestmark = needs_node

LENGTH = 1 << 20
MAX_CACHE, MAX_DOCUMENT = 200_000, 250_000  # characters of JSON


def packed_ids():
    """400 documents of different lengths."""
    starts = np.sort(np.random.default_rng(0).choice(LENGTH, 400, replace=False))
    return np.searchsorted(starts, np.arange(LENGTH), side="right").astype(np.int32)[None]


def few_flags():
    flags = np.zeros((1, LENGTH), int)
    flags[0, np.random.default_rng(1).choice(LENGTH, 50, replace=False)] = 1
    return flags


def table():
    """Each query block lists itself, the block before and a random one."""
    blocks = np.arange(LENGTH // 64)
    drawn = np.random.default_rng(2).integers(0, len(blocks), len(blocks))
    return np.stack([blocks, np.maximum(blocks - 1, 0), drawn], 1).astype(np.int32)[None]


LONG = {
    "window": lambda: ls.Causal() & ls.Window(1023, 0),
    "pinned keys": lambda: ls.Causal() & (ls.Window(511, 0) | ls.Global((0, 5, 70_000), rows=False)),
    "documents": lambda: ls.Causal() & ls.Segments(packed_ids()) & ls.Window(4095, 0),
    "first tokens": lambda: ls.Causal() & ls.Segments(packed_ids()) & ~ls.FirstOfSegment(packed_ids(), 4),
    "global tokens": lambda: ls.longformer(256, token_kinds=few_flags()),
    "chunks": lambda: ls.Causal() & ls.Chunk(8192),
    "dilated": lambda: ls.Causal() & ls.Window(128, 0, dilation=16),
    "blocks": lambda: ls.Causal() & ls.Blocks(table(), 64),
}


@pytest.mark.check
@pytest.mark.parametrize("name", LONG)
def test_a_million_tokens_are_counted_exactly_and_stored_in_few_bytes(name):
    mask = LONG[name]()
    made = document(mask, LENGTH)
    sizes = {key: len(json.dumps(value)) for key, value in made.items()}
    assert sizes["cache"] <= MAX_CACHE and sum(sizes.values()) <= MAX_DOCUMENT, sizes
    pairs, tiles = ask(made, ["count"], ["tiles", 128, 256])
    layout = plan_layout(mask, LENGTH, LENGTH, 128, 256, xp=np)
    counts = count(layout)
    assert counts.sampled is None and pairs == counts.pairs
    assert (tiles["partial"], tiles["full"]) == (counts.partial, counts.full)


@pytest.mark.check
def test_a_million_tokens_are_compared_exactly():
    made = document(ls.Causal() & ls.Window(1023, 0), LENGTH, other=ls.Causal() & ls.Window(1023, 0) & ~ls.Prefix(4))
    first, late, none = ask(made, ["diff"], ["diff", 1022, 3], ["diff", 1026, 3])
    assert first == dict(same=False, pair=dict(q=0, k=0, allowed_by="first"), complete=True)
    assert late["pair"] == dict(q=1023, k=0, allowed_by="first")
    assert none == dict(same=None, pair=None, complete=True)


@rule
class Products(Mask):
    """Allows the pairs whose positions have a product with a small remainder, and says which tiles cannot have any."""

    least: int

    def allowed(self, q, kv):
        return (q.position * kv.position % 7 < 2) & (q.position + kv.position >= self.least)

    def classify(self, q, kv):
        return q.last + kv.last >= self.least, (q.first < 0) & (kv.first < 0)


def test_a_users_rule_is_evaluated_in_cells_of_a_long_mask():
    length, mask = 1100, Products(900) & ls.Causal()
    made = document(mask, length)
    assert made["notes"] == [
        "Python evaluated Products(least=900) in cells of 3 x 3 pairs. This page does not know the pairs of a cell "
        "of which some are allowed. Engines skip tiles by the rule's bounds, and may visit more tiles than "
        "the pairs need."
    ]
    (rows,), (pairs,) = ask(made, ["dense"]), ask(made, ["count"])
    wanted = np.asarray(mask.dense(length))[0, 0]
    found = np.array([list(row) for row in rows])
    assert (found[wanted] != "0").all() and (found[~wanted] != "1").all()
    assert pairs is None and (found == "?").any() and (found[np.triu_indices(length, 1)] == "0").all()
    assert (found[:400, :400] == "0").all(), "no pair of these cells is allowed"


def test_a_rule_that_is_too_long_to_evaluate_is_not_known():
    made = document(ls.Causal() & ls.Custom(lambda q, k: q % 3 == k % 3), 10_000)
    assert made["notes"][0].startswith("Custom(<lambda>) has no bounds, and 100,000,000 pairs are too many to evaluate")
    unknown, masked, pairs = ask(made, ["allowed", 5, 5], ["allowed", 5, 6], ["count"])
    assert (unknown, masked, pairs) == (None, False, None)
