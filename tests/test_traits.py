"""Properties of masks, which the rest of the package reads instead of keeping lists of mask types."""

import numpy as np
import pytest

import longspan as ls
from longspan.engines.cpu.program import supports, unsupported_rules
from longspan.masks.by_slot import kv_flags
from tests.users_masks import LastKeys, Louder, Near, NearSlots, Wrapped

IDS, FLAGS = np.zeros((1, 5), int), np.zeros((1, 5), bool)
POSITION, SLOT = frozenset({"position"}), frozenset({"slot"})
READS = [
    (ls.Full(), frozenset()),
    (ls.Empty(), frozenset()),
    (ls.Causal(), POSITION),
    (ls.Band(-1, None), POSITION),
    (ls.Window(1, 1, dilation=2), POSITION),
    (ls.Chunk(2), POSITION),
    (ls.BlockCausal(2), POSITION),
    (ls.Prefix(2), POSITION),
    (ls.Custom(lambda q, k: q == k), POSITION),
    (ls.KvLengths(3), SLOT),
    (ls.QLengths(3), SLOT),
    (kv_flags(FLAGS), SLOT),
    (ls.Between(np.arange(5), np.arange(5) + 2), SLOT),
    (ls.Segments(IDS), SLOT),
    (ls.FirstOfSegment(IDS, 1), SLOT),
    (ls.TokenTypes(IDS), SLOT),
    (ls.Blocks(np.zeros((1, 1, 1), int), 5), SLOT),
    (ls.Dense(np.ones((5, 5), bool)), SLOT),
    (ls.Dense(np.ones((2, 3), bool), 1, 1), SLOT),
    (ls.Global(), frozenset()),
    (ls.Global((0,)), POSITION),
    (ls.Global(kv_flags=FLAGS), SLOT),
    (ls.Global((0,), q_flags=FLAGS), POSITION | SLOT),
    (Near(2), POSITION | SLOT),
    (NearSlots(2), SLOT),
    (ls.Causal() & ls.Segments(IDS), POSITION | SLOT),
    (~(ls.Causal() | ls.Chunk(2)), POSITION),
    (ls.PerHead((ls.Full(), ls.KvLengths(3))), SLOT),
    (NearSlots(2).cut([0, 1]), SLOT),
]


@pytest.mark.parametrize("mask, reads", READS, ids=lambda m: repr(m) if isinstance(m, ls.Mask) else "")
def test_masks_read_both_by_default(mask, reads):
    assert mask.reads == reads


def test_reads_is_true():
    """Masks by position do not depend on slots, and masks by slot do not depend on positions."""
    rng = np.random.default_rng(0)
    order = rng.permutation(5)
    for mask, reads in READS:
        if "slot" not in reads:
            moved = mask.dense(5, 5, q_positions=order, kv_positions=order)
            np.testing.assert_array_equal(moved, mask.dense(5, 5)[:, :, order][:, :, :, order])
        if "position" not in reads:
            sizes = (mask._length("T") or 5, 5)
            places = rng.integers(0, 99, sizes[0]), rng.integers(0, 99, sizes[1])
            moved = mask.dense(*sizes, q_positions=places[0], kv_positions=places[1])
            np.testing.assert_array_equal(moved, mask.dense(*sizes))
        if not mask.reads_q_place:
            sizes = (mask._length("T") or 5, 5)
            moved = mask.dense(*sizes, q_positions=rng.integers(0, 99, sizes[0]))
            np.testing.assert_array_equal(moved, mask.dense(*sizes))


def test_only_rules_that_compare_the_query_read_its_place():
    for mask in (ls.Prefix(3), ls.Global((0,), rows=False), ls.KvLengths(3) & ls.Prefix(2), ~ls.Prefix(1), ls.Full()):
        assert not mask.reads_q_place
    for mask in (ls.Causal(), ls.Global((0,)), ls.Global((0,), columns=False), Near(3), ls.Prefix(3) | ls.Chunk(2)):
        assert mask.reads_q_place
    assert ls.QLengths(3).reads_q_place and ls.BlockCausal(3).reads_q_place
    assert [ls.Dense(np.ones((5, 5), bool), at).reads_q_place for at in (None, 0)] == [False, True]


def test_with_parts_of_parts_is_the_same_composition():
    causal, near, chunk = ls.Causal(), Near(3), ls.Chunk(4)
    for mask in (causal & near & chunk, causal | near, ~near, ls.PerHead((causal, near))):
        assert mask.with_parts(mask.parts()) == mask
        assert all(a is b for a, b in zip(mask.with_parts(mask.parts()).parts(), mask.parts(), strict=True))
    assert (causal & near).with_parts((chunk, chunk)) == chunk & chunk
    assert causal.parts() == () and causal.with_parts(()) is causal
    heads = ls.PerHead((chunk, causal))
    mask = causal & ~(near | heads)
    assert list(mask.walk()) == [mask, causal, ~(near | heads), near | heads, near, heads, chunk, causal]


def test_unbounded_lists_rules_without_bounds():
    custom = ls.Custom(lambda q, k: q == k)
    bounded = ls.Custom(lambda q, k: q >= k, bounds=lambda q, kv: (q.last >= kv.first, q.first >= kv.last))
    last = LastKeys(3)
    mask = (ls.Causal() & custom) | ~ls.PerHead((last, bounded, Near(3), Louder(IDS, IDS)))
    assert mask.unbounded() == (custom, last)
    assert last.cut([1, 2]).unbounded() == (last,) and Near(3).cut([1]).unbounded() == ()
    assert Wrapped(ls.Causal()).unbounded() == () and all(
        not m.unbounded() for m, _ in READS if not isinstance(m, ls.Custom)
    )


def test_the_kernel_lists_the_rules_that_it_does_not_support():
    near, view = Near(3), NearSlots(3).cut([1, 2])
    mask = (ls.Causal() & near) | ~ls.PerHead((view, ls.Chunk(3), ls.KvLengths(3).cut(None, [1, 2])))
    assert unsupported_rules(mask) == (near, view) and not supports(mask)
    assert supports(ls.Causal() & ls.KvLengths(3).cut(None, [1, 2]) & ls.Blocks(np.zeros((1, 1, 1), int), 2))
    assert unsupported_rules(Wrapped(ls.Causal())) == (Wrapped(ls.Causal()),)


def test_a_maskinfo_reads_the_names_of_rules_from_the_masks():
    rules = ls.Window(3, 0) & ls.Causal() & ls.Chunk(9) & ls.TokenTypes(IDS) & Near(3)
    assert all(ls.MaskInfo.from_mask(rules, 1, 5).baked_in_masks.values())
    assert ls.MaskInfo.from_mask(ls.Band(-1, 0), 1, 5).baked_in_masks["sliding_window"]
    assert not any(ls.MaskInfo.from_mask(Near(3) | ls.Causal(), 1, 5).baked_in_masks.values())
