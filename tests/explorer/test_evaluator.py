"""The page's evaluator in JavaScript equals Python: pairs, reasons, tiles, counts, differences and costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import longspan as ls
from longspan.explorer.document import document
from longspan.layout import plan_layout
from longspan.testing import masks
from tests.explorer.evaluator import ask, needs_node

pytestmark = needs_node

T, S, B, N = 13, 11, 2, 3
ANY_MASK = masks(T, S, batch=B, heads=N)
tile = st.integers(1, 6)
row, head = st.integers(0, B - 1), st.integers(0, N - 1)
places = st.none() | st.integers(0, 2**32 - 1)


def place(seed, length):
    """Positions in any order; None: the slots' indices."""
    if seed is None:
        return None
    return np.random.default_rng(seed).integers(-3, 12, size=(B, length)).astype(np.int32)


class Shown:
    """A mask, the row and the head that a page shows, and the answers of Python."""

    def __init__(self, mask, q_seed, kv_seed, row, head, other=None):
        self.positions = dict(q_positions=place(q_seed, T), kv_positions=place(kv_seed, S))
        compared = [mask] if other is None else [mask, other]
        rows = [m.batch for m in compared]
        if q_seed is not None or kv_seed is not None:
            rows.append(B)
        self.mask, self.row = mask, min(row, max(rows) - 1)
        self.head = min(head, max(m.heads for m in compared) - 1)
        self.document = document(mask, T, S, other=other, batch=self.row, head=self.head, **self.positions)
        self.is_opaque = '"cells"' in str(self.document).replace("'", '"')

    def dense(self, mask):
        found = np.asarray(mask.dense(T, S, **self.positions))
        return found[min(self.row, found.shape[0] - 1), min(self.head, found.shape[1] - 1)]

    def tiles(self, q_tile, kv_tile):
        """(some, every, visited) of each tile."""
        layout = plan_layout(self.mask, T, S, q_tile, kv_tile, **self.positions, xp=np).lowered()
        here = dict(batch=np.full((1, 1, 1, 1), self.row), head=np.full((1, 1, 1, 1), self.head))
        q, kv = (side.at(**here) for side in layout.sides(batch=B, heads=N, xp=np))
        shape = (1, 1, layout.q_tiles, layout.kv_tiles)
        kinds = layout.mask.classify(q.tiles(q_tile), kv.tiles(kv_tile))
        some, every = (np.broadcast_to(np.asarray(kind), shape)[0, 0] for kind in kinds)
        visited = np.zeros(shape[2:], int)
        last_row, last_head = list(layout.planes())[-1]
        for rows, tiles in layout.entries(min(self.row, last_row), min(self.head, last_head)):
            np.add.at(visited, (rows, tiles), 1)
        return some, every, visited


@given(ANY_MASK, ANY_MASK, places, places, row, head)
def test_pairs_counts_and_differences_equal_python(mask, other, q_seed, kv_seed, row, head):
    shown = Shown(mask, q_seed, kv_seed, row, head, other)
    wanted, others = shown.dense(mask), shown.dense(other)
    dense, count, differences = ask(shown.document, ["dense"], ["count"], ["differences"])
    assert dense == ["".join(map(str, line)) for line in wanted.astype(int)]
    assert count == wanted.sum()
    allowed_by = np.where(wanted, "first", "second")
    assert differences == [
        dict(q=q, k=k, allowed_by=allowed_by[q, k]) for q, k in np.argwhere(wanted != others).tolist()
    ]


@given(ANY_MASK, tile, tile, places, places, row, head)
def test_tiles_equal_those_of_python(mask, q_tile, kv_tile, q_seed, kv_seed, row, head):
    shown = Shown(mask, q_seed, kv_seed, row, head)
    some, every, visited = shown.tiles(q_tile, kv_tile)
    kinds, found = ask(shown.document, ["kinds", q_tile, kv_tile], ["tiles", q_tile, kv_tile])
    kinds = np.array([[int(kind) for kind in line] for line in kinds]).reshape(some.shape)
    dense, rows, columns = shown.dense(mask), np.arange(0, T, q_tile), np.arange(0, S, kv_tile)
    pairs = np.add.reduceat(np.add.reduceat(dense.astype(int), rows, 0), columns, 1)
    sizes = np.minimum(q_tile, T - rows)[:, None] * np.minimum(kv_tile, S - columns)
    may_any, must_all = (kinds & 1) > 0, (kinds & 2) > 0
    assert (may_any >= (pairs > 0)).all() and (must_all <= (pairs == sizes)).all(), "sound"
    assert (may_any <= some).all() and (must_all >= every).all(), "as tight as Python"
    partial, full = int(visited[some & ~every].sum()), int(visited[every].sum())
    if shown.is_opaque:  # the page reads the pairs of a rule, engines its bounds
        assert found["partial"] + found["full"] <= partial + full and found["full"] >= full
        return
    assert found == dict(
        q_tile=q_tile, kv_tile=kv_tile, total=some.size, visited=int(visited.sum()),
        empty=some.size - partial - full, partial=partial, full=full,
    )  # fmt: skip


@given(ANY_MASK, places, places, row, head, st.integers(0, T - 1), st.integers(0, S - 1))
def test_the_reason_has_the_truth_of_every_leaf(mask, q_seed, kv_seed, row, head, q, k):
    shown = Shown(mask, q_seed, kv_seed, row, head)
    (why,) = ask(shown.document, ["why", q, k])
    assert why["allowed"] == shown.dense(mask)[q, k]
    assert why["q"]["slot"] == q and why["k"]["slot"] == k
    for side, positions, slot in (("q", "q_positions", q), ("k", "kv_positions", k)):
        given = shown.positions[positions]
        assert why[side]["position"] == (slot if given is None else given[shown.row, slot])

    def check(node, part):
        assert node["allowed"] == shown.dense(part)[q, k]
        parts = part.parts()
        if isinstance(part, ls.PerHead):
            parts = [parts[min(shown.head, len(parts) - 1)]]
        if node["op"] == "leaf":
            assert node["text"] == repr(part)
        for child, own in zip(node.get("parts", []), parts, strict=True):
            check(child, own)

    check(why["tree"], mask)


@given(masks(T, S, batch=1, heads=1), tile, tile)
def test_costs_equal_those_of_explain(mask, q_tile, kv_tile):
    made = document(mask, T, S)
    if '"cells"' in str(made).replace("'", '"'):
        return
    q, k = (jax.ShapeDtypeStruct((1, length, 1, 64), jnp.bfloat16) for length in (T, S))
    layout = plan_layout(mask, T, S, q_tile, kv_tile, xp=np)
    report = ls.explain(q, k, k, mask=layout, engine="reference")
    costs, tiles = ask(made, ["costs", q_tile, kv_tile], ["tiles", q_tile, kv_tile])
    names = ("useful_flops", "executed_flops", "array_bytes", "dense_mask_bytes")
    assert {name: costs[name] for name in names} == {name: getattr(report, name) for name in names}
    kinds = {name: tiles[name] for name in ("total", "empty", "partial", "full")}
    assert kinds == {name: getattr(report, f"tiles_{name}") for name in kinds}


SIZES = [(0, 0), (0, 5), (5, 0), (1, 1), (1, 7), (2, 3), (8, 8), (9, 17), (64, 63)]


@pytest.mark.parametrize("q_len, kv_len", SIZES)
def test_every_small_size(q_len, kv_len):
    mask = (ls.Causal(1) & ls.Window(3, 2, dilation=2)) | ls.Global((0, 4)) | ~ls.Chunk(3)
    dense, count, kinds, same = ask(
        document(mask, q_len, kv_len, other=~~mask), ["dense"], ["count"], ["tiles", 4, 3], ["diff"]
    )
    wanted = np.asarray(mask.dense(q_len, kv_len))[0, 0]
    assert dense == ["".join(map(str, line)) for line in wanted.astype(int)]
    assert count == wanted.sum() and kinds["total"] == -(-q_len // 4) * -(-kv_len // 3)
    assert same == dict(same=True, pair=None, complete=True)


def test_questions_outside_of_the_mask_are_errors():
    made = document(ls.Causal(), 4, 3)
    questions = [["allowed", 4, 0], ["allowed", 0, 3], ["why", -1, 0], ["tiles", 0, 4], ["tiles", 2, 1.5]]
    questions += [["diff", 9, 0], ["set"], ["set", 1]]
    answers = ask(made, *questions)
    assert [answer["error"].splitlines()[0] for answer in answers[:5]] == [
        "RangeError: q must be an integer from 0 to 3, got 4.",
        "RangeError: k must be an integer from 0 to 2, got 3.",
        "RangeError: q must be an integer from 0 to 3, got -1.",
        "RangeError: q_tile must be an integer from 1 to 1073741823, got 0.",
        "RangeError: kv_tile must be an integer from 1 to 1073741823, got 1.5.",
    ]
    assert answers[5]["error"] == "There is no other mask."
    assert answers[6] == "Causal()"
    assert "There must be 0 numbers" in answers[7]["error"]
