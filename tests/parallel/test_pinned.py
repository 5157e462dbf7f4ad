"""`Mask.pinned`: for tokens that are not pinned, the mask equals its `rest`."""

import hypothesis
import jax
import numpy as np
import pytest

import longspan as ls
from longspan.masks import rule
from longspan.masks.pytree import axes_of
from tests.users_masks import Louder

LENGTH, BATCH, HEADS = 7, 2, 3


@hypothesis.settings(max_examples=40)
@hypothesis.given(ls.testing.masks(LENGTH, LENGTH, batch=BATCH, heads=HEADS))
def test_a_mask_is_its_rest_where_nothing_is_pinned(mask):
    rest, columns, rows, kv_flags, q_flags = mask.pinned(LENGTH)
    keys, queries = (np.zeros((BATCH, LENGTH), bool) for _ in range(2))
    for pinned, places, flags in ((keys, columns, kv_flags), (queries, rows, q_flags)):
        pinned[:, sorted(places)] = True
        for array in flags:
            pinned |= np.asarray(array)
    ordinary = ~(queries[:, None, :, None] | keys[:, None, None])
    got, want = (np.broadcast_to(m.dense(LENGTH, LENGTH), (BATCH, HEADS, LENGTH, LENGTH)) for m in (rest, mask))
    np.testing.assert_array_equal(got & ordinary, want & ordinary)


def test_prefixes_and_global_tokens_are_pinned():
    mask = ls.Causal() & (ls.Window(2, 0) | ls.Prefix(2) | ls.Global((4, 9)))
    rest, columns, rows, *flags = mask.pinned(7)
    assert (columns, rows, flags) == ({0, 1, 4}, {4}, [(), ()])
    np.testing.assert_array_equal(rest.dense(7, 7), (ls.Causal() & ls.Window(2, 0)).dense(7, 7))


def test_a_traced_prefix_is_not_pinned():
    assert not ls.Prefix(np.array([2, 3])).pinned(7).columns


def test_a_subclass_with_another_rule_pins_nothing():
    @rule
    class Other(ls.Prefix):
        def allowed(self, q, kv):
            return kv.position > q.position

    assert not Other(2).pinned(7).columns


@hypothesis.settings(max_examples=40)
@hypothesis.given(ls.testing.masks(LENGTH, LENGTH, batch=BATCH, heads=HEADS))
def test_the_axes_of_arrays_are_those_of_their_extents(mask):
    sizes = dict(B=BATCH, N=HEADS, T=LENGTH, S=LENGTH)
    for letters, array in zip(axes_of(mask), jax.tree.leaves(mask), strict=True):
        assert len(letters) == np.ndim(array)
        assert all(
            n in (1, sizes[letter]) for letter, n in zip(letters, np.shape(array), strict=True) if letter in "BN"
        )


def test_arrays_of_users_rules_have_unknown_axes():
    loud = np.zeros((2, 7))
    assert axes_of(Louder(loud, loud)) == ["..", ".."]


@pytest.mark.parametrize("mask", [ls.Causal(), ls.Segments(np.zeros((1, 7), int)), ~ls.KvLengths(3) & ls.Global((1,))])
def test_rules_by_token_hold_in_another_order(mask):
    assert mask.by_token or "slot" not in mask.reads
