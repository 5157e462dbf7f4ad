"""Pictures of `MaskInfo`, character by character."""

import numpy as np
import pytest

import longspan as ls
from longspan import MaskInfo

PACKED = np.array([[0, 0, 0, 0, 1, 1, 1, -1, -1], [3, 3, 3, 3, 3, 3, 3, 3, 3]])
TITLE = "Attention mask of batch {}, head 0: 9 queries x 9 keys in blocks of {}\n"
SEGMENTS = "; left: query ids, above: key ids (PAD: padding, MIX and ??: several ids)"


def test_unicode_blocks_with_ids_along_the_edges():
    picture = MaskInfo.from_segments(PACKED).apply_causal().visualize(block_size=2, return_str=True)
    assert picture == TITLE.format(0, "2 x 2") + (
        "     000001??\n"
        "    +----------+\n"
        "   0|░░        |\n"
        "   0|██░░      |\n"
        "   1|    ░░    |\n"
        " MIX|    ░░░░  |\n"
        " PAD|          |\n"
        "    +----------+\n"
        "██ all, ░░ some, blank none" + SEGMENTS
    )


def test_ascii_blocks_that_are_not_square():
    picture = MaskInfo.from_segments(PACKED).apply_causal().visualize((3, 1), batch=1, charset="ascii", return_str=True)
    assert picture == TITLE.format(1, "3 x 1") + (
        "     030303030303030303\n"
        "    +------------------+\n"
        "   3|##....            |\n"
        "   3|########....      |\n"
        "   3|##############....|\n"
        "    +------------------+\n"
        "## all, .. some, blank none" + SEGMENTS
    )


def test_a_ragged_last_block_is_drawn_by_its_real_cells():
    picture = MaskInfo.from_segments(PACKED).visualize(
        4, batch=1, charset="ascii", show_segments=False, return_str=True
    )
    assert picture == TITLE.format(1, "4 x 4") + (
        "+------+\n"
        "|######|\n"
        "|######|\n"
        "|######|\n"
        "+------+\n"
        "## all, .. some, blank none"
    )  # fmt: skip


def test_blocks_grow_until_the_picture_fits_the_screen():
    info = MaskInfo.from_mask(ls.Causal(), batch=1, q_len=300)
    picture = info.visualize(block_size=8, max_rows=5, max_cols=10, charset="ascii", return_str=True)
    assert picture == (
        "Attention mask of batch 0, head 0: 300 queries x 300 keys in blocks of 64 x 32\n"
        "     00000000000000000000\n"
        "    +--------------------+\n"
        "   0|....                |\n"
        "   0|####....            |\n"
        "   0|########....        |\n"
        "   0|############....    |\n"
        "   0|################....|\n"
        "    +--------------------+\n"
        "## all, .. some, blank none" + SEGMENTS
    )
    whole = info.visualize(block_size=8, max_rows=5, max_cols=10, fit_in_screen=False, return_str=True)
    assert len(whole.splitlines()) == 38 + 5


def test_heads_and_positions_are_drawn():
    dense = np.zeros((1, 2, 2, 3), bool)
    dense[0, 1, 1] = True
    picture = MaskInfo.from_attention_mask(dense).visualize(1, head=1, charset="ascii", return_str=True)
    assert picture.splitlines()[3:5] == [" PAD|      |", "   0|######|"]
    rolling = MaskInfo.from_mask(
        ls.Causal(), 1, 1, 4, q_positions=np.array([[5]]), kv_positions=np.array([[4, 5, 6, 3]])
    )
    assert "|####  ##|" in rolling.visualize(1, charset="ascii", return_str=True)


def test_ids_of_more_than_two_digits_keep_their_place():
    picture = MaskInfo.from_segments(np.array([[12345, 100]])).visualize(1, charset="ascii", return_str=True)
    assert picture.splitlines()[1:5] == ["      4500", "     +----+", "12345|##  |", "  100|  ##|"]


def test_it_prints_unless_asked_for_a_string(capsys):
    info = MaskInfo.from_segments(PACKED)
    assert info.visualize(2) is None
    assert capsys.readouterr().out == info.visualize(2, return_str=True) + "\n"


def test_a_million_tokens_are_drawn_without_evaluating_every_pair():
    info = MaskInfo.from_mask(ls.Causal() & ls.Window(4095, 0), batch=1, q_len=1_000_000)
    picture = info.visualize(128, max_rows=8, max_cols=8, charset="ascii", show_segments=False, return_str=True)
    assert picture.splitlines()[2:5] == ["|..              |", "|....            |", "|  ....          |"]


@pytest.mark.parametrize("info", [MaskInfo.from_segments(PACKED), MaskInfo.from_mask(ls.Causal(), 1, 0)], ids=repr)
def test_notebooks_show_a_picture_and_the_rule(info):
    page = info._repr_html_()
    assert page == info.to_html()
    assert page.startswith('<div class="longspan"') and "<svg" in page
    assert "<script" not in page
    assert repr(info.mask).replace("&", "&amp;") in page
    assert page.count("<path") == (info.q_len > 0), "one shade, that of allowed pairs"
