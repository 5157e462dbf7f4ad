"""Comparisons of terms: users' rules made of them, the ends of int32, and engines that name no leaf."""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.engines.cpu.program import supports
from longspan.layout import count, plan_layout
from longspan.masks import Compare, Rule, array, member, number, position, rule, slot
from longspan.masks.rules import atoms_of
from longspan.testing import Shape, assert_matches_reference, assert_obeys_laws, make_qkv
from tests import oracle
from tests.engines import every_engine

ROOT = Path(__file__).parent.parent
LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max


@rule
class Diagonal(Rule):
    """Allows k = q + shift."""

    shift: int

    def lower(self):
        return Compare(position() + self.shift, "==", position())


@rule
class Louder(Rule):
    """Allows keys that are at least as loud as the query, with a loudness per head."""

    q_loud: jax.Array
    kv_loud: jax.Array

    def lower(self):
        ears = ls.PerHead((ls.Full(), ls.Causal(), ls.Window(3, 0)))
        return Compare(array(self.q_loud), "<=", array(self.kv_loud)) & ears


def test_terms_are_written_as_they_are_read():
    assert repr(position() // 4 % 3 - 2) == "position // 4 % 3 - 2"
    assert repr(Compare(slot() + 1, "<", number(5))) == "Compare(slot + 1 < 5)"
    assert position() // 4 + 1 == position(divide=4, plus=1) != position(divide=4)
    assert (number(3) + 2 - 1).plus == 1 and (slot() % jnp.int32(2)).modulo.shape == ()
    assert hash(Compare(position(), "<=", member([3, 1]))) == hash(Compare(position(), "<=", member((3, 1))))
    flags = np.array([[True, False]])
    assert array(flags, valid="!=0").data.tolist() == [[1, 0]]


@rule
class Undefined(Rule):
    """Neither `lower` nor `allowed`."""


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: (position() + 1) // 2,
            ValueError,
            r"position \+ 1 cannot be divided. In a term, `//` must come before",
        ),
        (lambda: (position() % 2) % 2, ValueError, "cannot be followed by `%`"),
        (lambda: position() // 0, ValueError, r"Term.divide must be >= 1, got 0"),
        (lambda: position(modulo=-1), ValueError, r"Term.modulo must be >= 1"),
        (lambda: position() + 1.5, TypeError, r"Term.plus must hold integers"),
        (lambda: array(np.zeros((2, 3))), TypeError, "an array of ints or bools, got dtype float64"),
        (lambda: array(np.zeros(3, int)), ValueError, r"got \(3,\). Add an axis, e.g. `entries\[None\]`"),
        (lambda: array([[1]], valid="> 0"), ValueError, "valid='> 0' is not one of 'all', '>=0', '!=0'"),
        (lambda: number(np.zeros((2, 2), int)), ValueError, r"int array of shape \(\) or \[B\]"),
        (lambda: Compare(position(), "!=", position()), ValueError, "relation='!=' is not one of '<='"),
        (lambda: Compare(3, "<=", position()), TypeError, r"Compare.q must be a term: `position\(\)`"),
        (
            lambda: Undefined().show(2, 2),
            NotImplementedError,
            r"Undefined must define `lower\(\)`, or `allowed\(q, kv\)`",
        ),
    ],
)
def test_invalid_terms_raise_errors_with_a_fix(unchecked, make, error, message):
    with pytest.raises(error, match=message):
        make()


@rule
class Returning(Rule):
    lowered: object

    def lower(self):
        return self if self.lowered == "itself" else self.lowered


@pytest.mark.parametrize(
    ("lowered", "message"),
    [
        (None, r"Returning.lower\(\) must return a Mask, got NoneType. Return a mask"),
        (lambda q, k: q >= k, r"must return a Mask, got function. Return `ls.Custom\(fn\)`"),
        (jnp.ones((3, 3), bool), r"must return a Mask, got \w+. Return `ls.Dense\(array\)`"),
        ("itself", r"Returning.lower\(\) returned the rule itself"),
    ],
)
def test_what_lower_must_return(lowered, message):
    for use in (lambda mask: mask.show(3, 3), lambda mask: (mask & ls.Causal()).layout(3, 3)):
        with pytest.raises((TypeError, ValueError), match=message):
            use(Returning(lowered))


def test_fields_that_could_change_are_refused():
    with pytest.raises(TypeError, match=r"Returning.lowered must be an array or a hashable value, got list"):
        Returning([ls.Causal()])


def test_a_rule_of_one_line_skips_tiles_runs_natively_and_bounds_caches():
    mask = Diagonal(-2)
    assert supports(mask) and supports(~mask) and not mask.unbounded() and not (~mask).inexact()
    assert mask.layout(4096, 4096).visits() == 63 and count(mask.layout(4096, 4096)).pairs == 4094
    assert (~mask).layout(4096, 4096, q_tile=1, kv_tile=1).visits() == 4096 * 4096 - 4094
    assert mask.cut([5, 1], [0, 3]) is mask
    assert ls.cache.plan(mask, 1000).capacity == 3  # a key is last seen two positions later
    assert ls.cache.plan(ls.Causal() & ~Diagonal(0) & ls.Window(4, 0), 1000).capacity == 5
    assert ls.parallel.plan(mask, 4096, 8).sent_rows < 20
    assert mask == Diagonal(-2) != Diagonal(2) and repr(mask) == "Diagonal(shift=-2)"


def test_a_rule_distinguishes_the_rows_and_heads_of_its_lowered_mask():
    rng = np.random.default_rng(0)
    loud = Louder(rng.integers(0, 9, (2, 7)), rng.integers(0, 9, (1, 11)))
    assert loud.heads == 3 and loud.batch == 2
    assert_obeys_laws(loud, 7, 11)
    q, k, v = make_qkv(Shape(B=2, T=7, S=11, N=3, K=1, H=5), jnp.float32)
    assert_matches_reference(["cpu", "xla"], q, k, v, loud)
    with pytest.raises(ValueError, match="covers 7 queries, but the call has 8"):
        loud.layout(8, 11)


EXTREME = np.array([[LEAST, -1, 0, MOST, MOST - 1, LEAST + 1, 1]], np.int32)
RELATIONS = ("<=", ">=", "<", ">", "==")


@pytest.mark.parametrize("valid", ["all", ">=0", "!=0"])
@pytest.mark.parametrize("relation", RELATIONS)
def test_entries_at_the_ends_of_int32_compare_correctly(relation, valid):
    q, k, v = make_qkv(Shape(B=1, T=7, S=7, N=2, K=1, H=5), jnp.float32)
    for mask in (
        Compare(array(EXTREME, valid=valid), relation, array(EXTREME[:, ::-1])),
        ~Compare(array(EXTREME), relation, array(EXTREME[:, ::-1], valid=valid)),
        Compare(number(0), relation, array(EXTREME, valid=valid)),
    ):
        want = oracle.dense(mask, 7, 7)
        np.testing.assert_array_equal(np.broadcast_to(mask.dense(7, 7), want.shape), want)
        np.testing.assert_array_equal(np.broadcast_to(mask.atoms().dense(7, 7), want.shape), want)
        assert_obeys_laws(mask, 7, 7)
        assert_matches_reference(["cpu", "xla"], q, k, v, mask)


FAR = 2**30 - 1
FURTHEST = {
    "causal": ls.Causal(FAR),
    "band": ls.Band(-FAR, FAR),
    "window": ls.Window(1, 0, dilation=FAR),
    "chunk": ls.Chunk(FAR),
    "block causal": ls.BlockCausal(FAR),
    "prefix": ls.Prefix(FAR),
    "terms": Compare(position() + FAR, "<", position() - FAR),
    "divided": Compare(position(), ">", position(divide=1000)),
}


@pytest.mark.parametrize("name", FURTHEST)
def test_negations_hold_at_the_furthest_positions(name):
    places = np.array([-FAR, -FAR + 1, -1, 0, 1, FAR - 1, FAR])
    q, k, v = make_qkv(Shape(B=1, T=7, S=7, N=2, K=1, H=5), jnp.float32)
    for mask in (FURTHEST[name], ~FURTHEST[name]):
        at = dict(q_positions=places, kv_positions=places)
        want = oracle.dense(mask, 7, 7, places, places)
        np.testing.assert_array_equal(np.broadcast_to(mask.dense(7, 7, **at), want.shape), want)
        assert_obeys_laws(mask, 7, 7, **at)
        assert_matches_reference(["cpu", "xla"], q, k, v, mask, **at)


@every_engine
def test_traced_numbers_and_entries_of_terms_are_read_when_the_program_runs(engine):
    q, k, v = make_qkv(Shape(B=2, T=7, S=11, N=2, K=1, H=5), jnp.float32)
    ids = np.random.default_rng(1).integers(-2, 4, (2, 11)).astype(np.int32)

    def masked(plus, ids):
        near = Compare(position() % 5 + plus, ">=", position() // 2)
        return near & ~Compare(number(plus), "==", array(ids, valid="!=0"))

    @jax.jit
    def run(plus, ids):
        return ls.attention(q, k, v, mask=masked(plus, ids), engine=engine)

    for plus in (np.array([1, -2], np.int32), np.array([9, 0], np.int32)):
        want = ls.attention(q, k, v, mask=ls.Dense(oracle.dense(masked(plus, ids), 7, 11, batch=2)), engine="reference")
        np.testing.assert_allclose(run(plus, ids), want, atol=2e-6)
    assert run._cache_size() == 1


def test_negated_masks_skip_tiles():
    without = ls.Causal() & ~ls.Window(1023, 0)
    layout = without.layout(8192, 8192)
    assert layout.visits() < ls.Causal().layout(8192, 8192).visits() - 300
    assert ~~ls.Chunk(4) == ~~ls.Chunk(4) and (~~ls.Chunk(4)).layout(512, 512, q_tile=4, kv_tile=4).visits() == 128


def test_heads_that_share_a_rule_share_the_lowered_mask():
    ids = ls.Segments(np.arange(8)[None] // 3)
    lowered = ls.PerHead((ids, ls.Causal(), ids, ids)).atoms()
    assert lowered.masks[0] is lowered.masks[2] is lowered.masks[3]


def test_of_several_static_bounds_the_tightest_is_kept():
    window = (ls.Causal() & ls.Window(63, 5) & ls.Causal(3) & ls.Band(-99, None)).atoms()
    assert [repr(part) for part in window.parts()] == [
        "Compare(position >= position)",
        "Compare(position - 63 <= position)",
    ]


def test_no_engine_names_a_leaf():
    rules = ["Causal", "Band", "Window", "Chunk", "BlockCausal", "Prefix", "KvLengths", "QLengths", "Segments"]
    rules += ["FirstOfSegment", "TokenTypes", "Between", "Global"]
    python, native = (ROOT / "longspan" / "engines").rglob("*.py"), (ROOT / "native").glob("*.[hc]*")
    imported = [
        alias.name
        for path in python
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("longspan.masks")
        for alias in node.names
    ]
    words = [word for path in native for word in re.findall(r"\bk([A-Z]\w+)", path.read_text("utf-8"))]
    assert {"Compare", "Blocks"} <= {*imported} and "Within" in words
    assert not {*imported, *words} & {*rules}


def test_comparisons_are_implemented_once():
    masks = ROOT / "longspan" / "masks"
    classify = {path.name: path.read_text().count("def classify") for path in masks.glob("*.py")}
    assert classify["compare.py"] == 1 and sum(classify.values()) <= 13
    for dead in ("query_range", "one_interval", "_band_at", "MergedBand", "_Banded", "KvFlags"):
        assert not [path.name for path in masks.glob("*.py") if dead in path.read_text()]


def test_lowering_is_remembered_for_small_masks_of_numbers_alone():
    window = ls.Causal() & ls.Window(5, 0)
    assert atoms_of(window) is atoms_of(ls.Causal() & ls.Window(5, 0))
    assert atoms_of(window) == window.atoms()
    assert atoms_of(ls.Causal() & ls.Window(6, 0)) == (ls.Causal() & ls.Window(6, 0)).atoms()
    for kept_apart in (ls.Causal(jnp.int32(1)), ls.Custom(lambda q, k: q == k), ls.Dense(np.ones((3, 3), bool))):
        mask = ls.Window(3, 0) & kept_apart
        assert atoms_of(mask) is not atoms_of(mask)


@rule
class OddKeys(Rule):
    """It holds an int alone, and lowers to an array, which inside `jit` is a tracer."""

    length: int

    def lower(self):
        return Compare(number(1), "<=", array(jnp.arange(self.length)[None] % 2))


@every_engine
def test_arrays_that_lowering_makes_inside_jit_do_not_outlive_it(engine):
    q, k, v = make_qkv(Shape(B=1, T=7, S=7, N=2, K=1, H=5), jnp.float32)
    want = ls.attention(q, k, v, mask=ls.Dense(np.arange(7)[None] % 2 == 1), engine="reference")
    for queries in (7, 4, 3):
        run = jax.jit(lambda q: ls.attention(q, k, v, mask=OddKeys(7), engine=engine))
        np.testing.assert_allclose(run(q[:, :queries]), want[:, :queries], atol=1e-5)


@rule
class Near(Rule):
    """`False` is no window, 0 is a window of one key: Python takes them for equal."""

    left: int | bool

    def lower(self):
        return ls.Causal() if self.left is False else ls.Window(self.left, 0)


def test_bools_and_ints_in_masks_are_not_equal():
    assert Near(False) != Near(0) and Near(True) != Near(1) and Near(True) == Near(True)
    assert [Near(left).layout(64, 64, q_tile=4, kv_tile=4).visits() for left in (False, 0)] == [136, 16]
    q, k, v = make_qkv(Shape(B=1, T=7, S=7, N=2, K=1, H=5), jnp.float32)
    for left, same in ((False, ls.Causal()), (0, ls.Window(0, 0))):
        got = ls.attention(q, k, v, mask=Near(left), engine="xla")
        np.testing.assert_allclose(got, ls.attention(q, k, v, mask=same, engine="reference"), atol=1e-5)


def test_numbers_at_the_ends_of_int32_are_planned_without_overflow():
    far, near = 2**31 - 1, 2**28
    for shift in (near - 1, near, near + 1, 2**30, far, -near, -near - 1, -far):
        mask = Compare(position() + shift, ">=", position() + shift) & ls.Window(2, 1)
        for xp in (np, jnp):
            layout = plan_layout(mask, 7, 11, 2, 3, xp=xp)
            assert np.array_equal(layout.starts, plan_layout(ls.Causal() & ls.Window(2, 1), 7, 11, 2, 3).starts)
            assert np.array_equal(layout.stops, plan_layout(ls.Causal() & ls.Window(2, 1), 7, 11, 2, 3).stops)
        one_sided = Compare(position() + shift, ">=", position())
        seen = one_sided.dense(7, 11)
        tiles = plan_layout(one_sided, 7, 11, 1, 1)
        widths = np.maximum(np.asarray(tiles.stops) - np.asarray(tiles.starts), 0)[0, 0, :, 0]
        assert np.array_equal(widths, np.asarray(seen)[0, 0].sum(1))
