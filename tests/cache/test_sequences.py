"""Random sequences of operations on caches, compared with dense attention over every token ever appended."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import longspan as ls
from tests.cache.brute import decodable
from tests.cache.sequences import BATCH, Sequence

COUNTS = (1, 2, 7, 24)  # few shapes, to compile little
LONGEST = 2**30 - 1
EXAMPLES = max(8, settings().max_examples if settings().max_examples > 1000 else 0)  # 2,000 in the slow suite


def position_masks(most: int, leaves: int = 4):
    """Masks by position, which are valid for any slots."""
    small = st.integers(0, 12)
    leaf = st.one_of(
        st.integers(-3, 3).map(ls.Causal),
        st.tuples(small, st.integers(0, 3)).map(lambda p: ls.Window(*p)),
        st.tuples(st.integers(0, 4), st.integers(0, 1), st.integers(2, 4)).map(
            lambda p: ls.Window(*p[:2], dilation=p[2])
        ),
        st.tuples(st.integers(-9, 2), st.integers(0, 4)).map(lambda p: ls.Band(p[0], p[0] + p[1])),
        st.integers(1, 9).map(ls.Chunk),
        st.integers(1, 9).map(ls.BlockCausal),
        small.map(ls.Prefix),
        st.lists(st.integers(0, most - 1), max_size=3, unique=True).map(
            lambda p: ls.Global(tuple(sorted(p)), rows=False)
        ),
        st.lists(st.integers(0, min(most, 30) - 1), max_size=2, unique=True).map(lambda p: ls.Global(tuple(sorted(p)))),
        st.sampled_from([ls.Full(), ls.Empty(), ls.Causal(), ls.Window(LONGEST, 0)]),
    )
    return st.recursive(leaf, _composed, max_leaves=leaves)


def _composed(inner):
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(lambda p: p[0] & p[1]),
        pairs.map(lambda p: p[0] | p[1]),
        pairs.map(ls.PerHead),
        inner.map(lambda mask: ~mask),
    )


def numbers(most):
    return st.lists(st.integers(0, most), min_size=BATCH, max_size=BATCH)


def operations(*how):
    """A list of (name, arguments)."""
    append = st.tuples(st.just("append"), st.tuples(st.sampled_from(COUNTS), numbers(24), st.sampled_from(how)))
    token = st.tuples(st.just("append"), st.tuples(st.just(1), st.just([1] * BATCH), st.sampled_from(how)))
    rollback = st.tuples(st.just("rollback"), st.tuples(numbers(4), st.sampled_from(["eager", "jit"][: len(how)])))
    fork = st.tuples(st.just("fork"), st.tuples(numbers(BATCH - 1)))
    save = st.tuples(st.just("save"), st.just(()))
    refuse = st.tuples(
        st.just("refuse"),
        st.tuples(st.integers(0, BATCH - 1), st.sampled_from(["append", "rollback", "end"])),
    )
    scan = st.tuples(st.just("scan"), st.tuples(st.just(5)))
    some = [append, append, token, token, rollback, fork, save, *([refuse, scan] if len(how) > 1 else [])]
    return st.lists(st.one_of(some), min_size=1, max_size=10)


def places(draw):
    """(length, start): short plans from the first position on, and very long plans from any position on."""
    length = draw(st.sampled_from([1, 17, 48, 60, 5000, 2**28, LONGEST]))
    near = st.integers(0, 60)
    start = st.one_of(st.just(0), near, near.map(lambda n: length - 1 - n), st.integers(0, length - 1))
    return length, min(max(draw(start), 0), length - 1)


@st.composite
def cases(draw, *how):
    length, start = places(draw)
    mask = draw(decodable(position_masks(min(length, 5000))))
    if length > 5000 and draw(st.booleans()):  # or most plans would keep every key, which takes too much memory
        mask = mask & ls.Window(draw(st.integers(0, 40)), 3)
    slack, heads_first = draw(st.sampled_from([0, 0, 1, 3, 9])), draw(st.booleans())
    return mask, length, start, slack, heads_first, draw(operations(*how))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("caches")


def run(case, seed, folder) -> int:
    """Runs a case and returns the number of its operations."""
    *of, events = case
    sequence = Sequence(*of, seed)
    for name, arguments in events:
        getattr(sequence, name)(*((folder,) if name == "save" else arguments))
    for _ in range(3):  # a key that was lost is missed here
        sequence.append(1, [1] * BATCH, "eager")
    return sequence.operations


@pytest.mark.check
@settings(max_examples=EXAMPLES)
@given(cases("eager"), st.integers(0, 2**32 - 1))
def test_caches_equal_dense_attention_over_all_tokens(folder, case, seed):
    run(case, seed, folder)


@pytest.mark.slow
@given(cases("eager", "jit", "step", "in place"), st.integers(0, 2**32 - 1))
def test_caches_in_programs_equal_dense_attention_over_all_tokens(folder, case, seed):
    run(case, seed, folder)
