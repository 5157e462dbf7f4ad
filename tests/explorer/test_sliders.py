"""Numbers of the page's expression: sliders, the ends of int32, floor division of negative numbers."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import longspan as ls
from longspan.explorer.document import document
from longspan.masks import Band, Compare, array, member, number, position, rule, slot
from longspan.testing import masks
from tests.explorer.evaluator import ask, needs_node

pytestmark = needs_node

T, S, B, N = 11, 7, 2, 2
FAR, MOST = 2**30 - 1, 2**31 - 1
NEAR = [0, 1, 2, 3, 5, FAR, FAR - 3, FAR + 1, MOST, 2**28, 2**29]
large = st.sampled_from([*NEAR, *(-n for n in NEAR), -MOST - 1]) | st.integers(-6, 12)
positive = st.sampled_from([n for n in NEAR if n > 0]) | st.integers(1, 12)
seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def as_number(values):
    """An int, an array of one number, or one with a number for each row."""
    rows = st.lists(values, min_size=B, max_size=B).map(lambda xs: np.array(xs, np.int32))
    return st.one_of(values, values.map(lambda x: np.array(x, np.int32)), rows)


def entries(length):
    return seeds.map(lambda rng: rng.choice([*NEAR, *(-n for n in NEAR), -1, -2], (1, length)).astype(np.int32))


@st.composite
def term(draw, length):
    steps = dict(plus=draw(as_number(large)))
    if draw(st.booleans()):
        steps |= dict(divide=draw(as_number(positive)), modulo=draw(st.none() | as_number(positive)))
    kind = draw(st.sampled_from(["position", "slot", "array", "number", "member"]))
    if kind == "array":
        return array(draw(entries(length)), valid=draw(st.sampled_from(["all", ">=0", "!=0"])), **steps)
    if kind == "number":
        return number(draw(as_number(large)))
    if kind == "member":
        return member(tuple(draw(st.lists(st.sampled_from([0, 3, FAR, -FAR]), max_size=3))))
    return position(**steps) if kind == "position" else slot(**steps)


LARGE_LEAF = st.one_of(
    as_number(large).map(ls.Causal),
    st.tuples(positive, positive, positive).map(lambda p: ls.Window(*p)),
    st.tuples(as_number(large), as_number(large)).map(lambda p: Band(*p)),
    as_number(positive).map(ls.Chunk),
    as_number(positive).map(ls.BlockCausal),
    as_number(positive).map(ls.Prefix),
    as_number(positive).map(ls.KvLengths),
    st.tuples(term(T), st.sampled_from(["<=", ">=", "<", ">", "=="]), term(S)).map(lambda p: Compare(*p)),
    st.tuples(entries(T), entries(S)).map(lambda p: ls.Segments(*p)),
    st.lists(st.sampled_from([0, 3, FAR, -FAR]), max_size=3).map(lambda p: ls.Global(tuple(p))),
)
LARGE_MASK = st.recursive(
    LARGE_LEAF,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: p[0] & p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] | p[1]),
        inner.map(lambda m: ~m),
    ),
    max_leaves=3,
)


def positions(length, *more):
    """Positions at the ends of int32 too, in any order; None: the slots' indices."""
    values = st.sampled_from([FAR, -FAR, FAR - 1, FAR - 3, 0, 1, *more]) | st.integers(-3, 9)
    listed = st.lists(values, min_size=length, max_size=length)
    return st.none() | listed.map(lambda x: np.array(x, np.int32)) | listed.map(lambda x: np.sort(x).astype(np.int32))


def lines(truth):
    return ["".join(map(str, line)) for line in truth.astype(int)]


def with_numbers(mask, numbers, leaves=None):
    """The mask with other numbers, made by the constructors of its leaves."""
    leaves = iter(range(1000)) if leaves is None else leaves
    if mask.parts():
        return mask.with_parts([with_numbers(part, numbers, leaves) for part in mask.parts()])
    leaf, changed = next(leaves), {}
    for entry in numbers:
        if entry["leaf"] == leaf and entry["fixed"] is None:
            changed.setdefault(entry["field"], []).append(entry["value"])
    changed = {name: tuple(v) if isinstance(getattr(mask, name), tuple) else v[0] for name, v in changed.items()}
    return dataclasses.replace(mask, **changed) if changed else mask


def changed(numbers, rng):
    """The document's numbers with other legal values, many of them near the ends of what is legal."""
    found = []
    for entry in numbers:
        legal = [n for n in (*NEAR, *(-n for n in NEAR), *range(-6, 12)) if entry["least"] <= n <= entry["greatest"]]
        if entry["fixed"] is None and legal and rng.random() < 0.8:
            entry = entry | dict(value=int(rng.choice(legal)))
        found.append(entry)
    return found


@given(LARGE_MASK, positions(T), positions(S, MOST), st.integers(0, B - 1), seeds)
def test_large_numbers_and_changed_ones_equal_python(mask, q_positions, kv_positions, row, rng):
    given = dict(q_positions=q_positions, kv_positions=kv_positions)
    row = min(row, mask.batch - 1)
    made = document(mask, T, S, batch=row, **given)
    numbers = changed(made["numbers"], rng)
    other = with_numbers(mask, numbers)
    wanted, then = (np.asarray(m.dense(T, S, **given))[row, 0] for m in (mask, other))
    values = [entry["value"] for entry in numbers]
    first = [entry["value"] for entry in made["numbers"]]
    answers = ask(made, ["dense"], ["count"], ["set", *values], ["dense"], ["count"], ["set", *first], ["dense"])
    assert answers[0] == answers[6] == lines(wanted) and answers[1] == wanted.sum()
    assert answers[3] == lines(then) and answers[4] == then.sum()
    assert answers[5] == made["mask"]["text"] == repr(mask)


@given(masks(T, S, batch=B, heads=N), seeds)
def test_sliders_of_every_rule_equal_python(mask, rng):
    made = document(mask, T, S)
    numbers = changed(made["numbers"], rng)
    other = with_numbers(mask, numbers)
    text, dense = ask(made, ["set", *(entry["value"] for entry in numbers)], ["dense"])
    assert dense == lines(np.asarray(other.dense(T, S))[0, 0])
    assert _without_defaults(text) == _without_defaults(repr(other))


def _without_defaults(text):
    """A repr leaves out numbers that equal the defaults; the page keeps those that it began with."""
    return text.replace("Causal(0)", "Causal()").replace(", dilation=1)", ")")


def test_negative_numbers_are_divided_and_reduced_as_in_python():
    positions = np.arange(-9, 9, dtype=np.int32)
    for divide, modulo, plus in [(4, None, 0), (1, 4, 0), (3, 2, -1), (4, 3, 5)]:
        steps = dict(divide=divide, modulo=modulo, plus=plus)
        mask = Compare(position(**steps), "<=", position(divide=2, plus=-1))
        given = dict(q_positions=positions, kv_positions=positions)
        (dense,) = ask(document(mask, 18, **given), ["dense"])
        assert dense == lines(np.asarray(mask.dense(18, **given))[0, 0])


def test_numbers_are_found_in_the_text_from_left_to_right():
    mask = ls.Causal(3) & (ls.Window(5, 1, dilation=2) | ls.Global((0, 8))) & ~ls.Chunk(4)
    made = document(mask, 16)
    text = made["mask"]["text"]
    assert [text[n["start"] : n["stop"]] for n in made["numbers"]] == ["3", "5", "1", "2", "0", "8", "4"]
    assert [(n["leaf"], n["field"]) for n in made["numbers"]][3:5] == [(1, "dilation"), (2, "indices")]
    assert all(n["fixed"] is None for n in made["numbers"])
    (changed,) = ask(made, ["set", -3, 15, 10, 200, 1, 80, 44])
    assert changed == "Causal(-3) & (Window(15, 10, dilation=200) | Global((1, 80))) & ~Chunk(44)"


@rule
class Doubled(ls.Causal):
    """Reads its number when it is made, and again when it is lowered."""

    def __post_init__(self):
        object.__setattr__(self, "offset", 2 * self.offset)


def test_a_number_that_the_page_cannot_follow_is_fixed_with_its_reason():
    ids = np.array([[0, 0, 1, 1]])
    first = ls.FirstOfSegment(ids, 2)  # its constructor computes an array from the number
    table = ls.Blocks(np.array([[[0], [1]]], np.int32), 2)
    heads = ls.PerHead((ls.Causal(1), ls.Causal(2)))
    cases = [
        (first, "The rule reads this number only when it is made."),
        (Doubled(3), "The rule reads this number only when it is made."),
        (table, "The table has one row for each block of this size."),
        (heads, "Head 0 does not use this rule."),
    ]
    for mask, reason in cases:
        made = document(mask, 4)
        assert made["numbers"][-1]["fixed"] == reason
        values = [entry["value"] for entry in made["numbers"]]
        (refused,) = ask(made, ["set", *values[:-1], values[-1] + 1])
        assert f"Number {len(values) - 1} cannot change. {reason}" in refused["error"]


@pytest.mark.parametrize("value", [-1, 2**30])
def test_an_illegal_number_is_an_error(value):
    (refused,) = ask(document(ls.Prefix(3), 8), ["set", value])
    assert f"Number 0 must be an integer from 0 to 1073741823, got {value}." in refused["error"]
