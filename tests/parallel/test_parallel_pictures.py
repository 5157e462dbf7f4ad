"""Pictures of plans: devices hold or receive the keys that the mask requires, as many as the plan counts."""

import importlib
import re
from dataclasses import replace
from xml.dom import minidom

import numpy as np
import pytest

import longspan as ls
from longspan.parallel.picture import device_tokens
from tests.parallel.families import BY_TOKEN, FAMILIES
from tests.selection import one_in

WHERE = [("contiguous", name) for name in FAMILIES] + [("zigzag", name) for name in BY_TOKEN]
MILLION = 1 << 20


def tokens_of(pieces):
    return {token for start, stop in pieces for token in range(start, stop)}


def rows_of(text):
    """The lines of devices."""
    return [line for line in text.splitlines() if re.match(r" *(\d+|\.\.\.)  ", line)]


@pytest.mark.parametrize(("order", "name"), one_in(4, [pytest.param(*where, id="-".join(where)) for where in WHERE]))
def test_every_key_that_a_device_needs_is_held_or_received(order, name):
    length, shards = 41, 4
    mask = FAMILIES[name](np.arange(length))
    plan = ls.parallel.plan(mask, length, shards, order)
    # Which tokens flags make global is not known before.
    told = mask.pinned(length).rest if any(plan.by_flags) else mask
    allowed = np.asarray(told.dense(length, length)).any((0, 1))
    everybody = [device_tokens(plan, device) for device in range(shards)]
    assert tokens_of(run for one in everybody for run in one.runs) == {*range(length)}
    for one in everybody:
        own = tokens_of(one.runs)
        keys = tokens_of((p.start, p.stop) for p in one.pieces if p.kind != "queries")
        queries = tokens_of((p.start, p.stop) for p in one.pieces if p.kind == "queries")
        assert not own & keys
        assert queries == {*plan.queries} - own
        needed = {*np.flatnonzero(allowed[sorted(own - {*plan.queries})].any(0)).tolist()}
        # Of blocks that tables list, it is told whose they are.
        listed = tokens_of(run for told in one.others for source in told.sources for run in everybody[source].runs)
        assert needed <= own | keys | listed, one.device
        for piece in one.pieces:
            owners = {other.device for other in everybody if tokens_of(other.runs) & {*range(piece.start, piece.stop)}}
            assert owners == {*piece.sources}


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("mask", [ls.Window(60, 9), ls.Causal() & ls.Window(100, 0), ls.Causal()], ids=repr)
def test_a_device_in_the_middle_receives_as_many_rows_as_the_plan_counts(mask, order):
    plan = ls.parallel.plan(mask, 1024, 8, order)
    assert sum(piece.stop - piece.start for piece in device_tokens(plan, 4).pieces) == plan.sent_rows


def test_a_picture_of_a_longformer_on_four_devices():
    shown = ls.parallel.plan(ls.Window(3, 3) | ls.Global((0, 40)), 64, 4).show(max_cells=16)
    assert shown.splitlines() == [
        "Window(3, 3) | Global((0, 40)): 64 tokens on 4 devices, contiguous, load max/mean 1.03",
        "  a  all-reduce: 2 rows, keys that every device needs",
        "  b  all-reduce of queries: 2 queries, sent to all devices, which send back the outputs of these queries",
        "  c  shift +1: 3 rows, keys from the device before",
        "  d  shift -1: 3 rows, keys from the device after",
        "  each device receives 9 rows forward and 9 backward; a row is the key and value of one token",
        "  the mask requires at least 8 rows forward; an all-gather sends 48",
        "device  holds  pairs  load  0   16  32  48    receives tokens from devices",
        "     0  0-15     106  0.97  ####:.....q.....  a 40 from 2; b query 40 from 2; d 16-18 from 1",
        "     1  16-31    112  1.03  q..:####:.q.....  "
        "a 0 from 0, 40 from 2; b queries 0 from 0, 40 from 2; c 13-15 from 0;",
        46 * " " + "d 32-34 from 2",
        "     2  32-47    112  1.03  q......:####:...  a 0 from 0; b query 0 from 0; c 29-31 from 1; d 48-50 from 3",
        "     3  48-63    106  0.97  q.........q:####  "
        "a 0 from 0, 40 from 2; b queries 0 from 0, 40 from 2; c 45-47 from 2",
        "cells of 4 tokens: # held, : some received, q received query, . neither held nor received",
        "pairs are counted per head, without those of global tokens",
    ]


def test_zigzag_shows_both_runs_and_a_ring_everything_else():
    rows = rows_of(ls.parallel.plan(ls.Causal(), 64, 4, "zigzag").show(max_cells=16))
    assert [row.split("  ")[-2:] for row in rows] == [
        ["##++++++++++++##", "a 8-55 from 1-3"],
        ["++##++++++++##++", "a 0-7 from 0, 16-47 from 2-3, 56-63 from 0"],
        ["++++##++++##++++", "a 0-15 from 0-1, 24-39 from 3, 48-63 from 0-1"],
        ["++++++####++++++", "a 0-23 from 0-2, 40-63 from 0-2"],
    ]


def test_chunks_receive_nothing():
    shown = ls.parallel.plan(ls.Chunk(8), 64, 8).show()
    assert "no communication" in shown
    assert all(row.endswith("  nothing") for row in rows_of(shown))


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    "mask", [ls.Causal() & (ls.Window(4095, 0) | ls.Prefix(4)), ls.Causal(), ls.Window(511, 511) | ls.Global((0,))]
)
def test_many_devices_are_shown_by_both_ends_on_a_screen(mask, order):
    shown = ls.parallel.plan(mask, MILLION, 256, order).show()
    rows = [row.split()[0] for row in rows_of(shown)]
    assert rows == ["0", "1", "2", "3", "4", "5", "...", "250", "251", "252", "253", "254", "255"]
    assert "244 more" in shown
    assert len(shown.splitlines()) < 48
    assert max(map(len, shown.splitlines())) < 176


def test_the_number_of_devices_and_of_characters_can_be_chosen():
    plan = ls.parallel.plan(ls.Window(3, 3), 64, 8)
    assert [row.split()[0] for row in rows_of(plan.show(devices=3))] == ["0", "1", "...", "7"]
    assert "5 more" in plan.show(devices=3)
    assert ".:+####+:." in plan.show(max_cells=32)
    assert "..+++########+++.." in plan.show(max_cells=64)
    with pytest.raises(ValueError, match="`devices` must be a Python int >= 2, got 1"):
        plan.show(devices=1)


def test_pictures_name_what_depends_on_data():
    ids, flags = np.zeros((1, 64), int), np.zeros((1, 64), bool)
    ring = ls.parallel.plan(ls.Causal() & ls.Segments(ids), 64, 4)
    assert "the pairs of a device depend on the mask's arrays" in ring.show()
    assert rows_of(ring.show())[0].split("  ")[-1] == "a up to all of 16-63 from 1-3"
    assert "# held, + received in the worst case" in ring.show()
    assert "received in the worst case" in ring._repr_html_()
    flagged = ls.parallel.plan(ls.Window(2, 2) | ls.Global(q_flags=flags, kv_flags=flags), 64, 4)
    assert rows_of(flagged.show())[0].endswith("  a up to 2 rows; b up to 2 queries; d 16-17 from 1")
    assert "not held; tokens received by the transfers a, b are not drawn" in flagged.show()
    assert "if more than 2 tokens are global, each device receives 48 rows forward" in flagged.show()
    assert "depends on the mask's arrays" in ring._repr_html_()


def test_random_blocks_are_shown_with_the_devices_that_send_them():
    blocks = ls.bigbird_random_blocks(4096, block_size=64, num_random_blocks=3, num_heads=2, seed=0)
    plan = ls.parallel.plan(ls.bigbird(4096, block_size=64, rand_attn=blocks), 4096, 8)
    shown = plan.show()
    assert "  c  shifts +1 -1: 128 rows, blocks that a table lists, different for each head" in shown
    assert [told[1:] for device in (0, 2, 7) for told in device_tokens(plan, device).others] == [
        (64, (1,)), (128, (1, 3)), (64, (6,)),
    ]  # fmt: skip
    assert "c up to 128 rows from 1, 3" in shown
    assert max(map(len, shown.splitlines())) < 200, "long rules are shortened"
    anywhere = np.random.default_rng(0).integers(0, 256, (2, 256, 2))
    everybody = ls.parallel.plan(ls.Blocks(anywhere, 16), 4096, 8)
    assert "  a  all-to-all: " in everybody.show()
    assert device_tokens(everybody, 3).others == ((0, everybody.steps[0].rows, (0, 1, 2, 4, 5, 6, 7)),)


def test_transfers_of_unknown_kinds_are_shown_by_their_description(monkeypatch):
    planning = importlib.import_module("longspan.parallel.plan")
    step = planning.Transfer("pigeons", 1234, "birds")
    monkeypatch.setattr(planning, "describe", lambda step: f"by air: {step.rows:,} rows, {step.why}")
    plan = replace(ls.parallel.plan(ls.Chunk(8), 64, 4), steps=(step,))
    assert "  a  by air: 1,234 rows, birds" in plan.show()
    assert all(row.endswith("  a up to 1,234 rows") for row in rows_of(plan.show()))
    assert "<b>a</b> up to 1,234 rows" in plan._repr_html_()


def test_a_device_with_only_padding_is_shown():
    assert "     3  padding      0  0.00" in ls.parallel.plan(ls.Full(), 5, 4).show()


def test_pages_show_a_bar_and_a_strip_per_device():
    page = ls.parallel.plan(ls.Window(512, 512) | ls.Global((0, 9000)), 16384, 8, "zigzag")._repr_html_()
    minidom.parseString(page)
    assert page.count("<svg") == 2 * 8 + 3, "and three in the legend"
    assert "<b>b</b> queries 0 from 0, 9,000 from 7" in page
    assert "240 more" in ls.parallel.plan(ls.Causal(), MILLION, 256)._repr_html_()
