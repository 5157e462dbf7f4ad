"""Masks written as text: the repr of a mask is parsed as the same mask, and any other text is an error."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import longspan as ls
from longspan.cli.expressions import parse

pytestmark = pytest.mark.quick

NUMBER = st.integers(0, 2000)
LEAVES = st.one_of(
    st.builds(ls.Causal, st.integers(-9, 9)),
    st.builds(ls.Window, NUMBER, NUMBER, dilation=st.integers(1, 9)),
    st.builds(ls.Band, st.none() | st.integers(-99, 0), st.none() | st.integers(0, 99)),
    st.builds(ls.Chunk, st.integers(1, 99)),
    st.builds(ls.Prefix, NUMBER),
    st.builds(ls.BlockCausal, st.integers(1, 99)),
    st.builds(ls.Global, st.lists(NUMBER, max_size=3).map(tuple)),
    st.sampled_from([ls.Full(), ls.Empty()]),
)
MASKS = st.recursive(
    LEAVES,
    lambda some: st.one_of(
        st.builds(lambda a, b: a & b, some, some),
        st.builds(lambda a, b: a | b, some, some),
        st.builds(lambda a: ~a, some),
        st.builds(lambda a, b: ls.PerHead((a, b)), LEAVES, LEAVES),
    ),
    max_leaves=6,
)


@given(MASKS)
def test_what_a_mask_prints_is_read_as_the_same_mask(mask):
    assert parse(repr(mask)) == mask


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        (" ls.Causal() &\n longspan.Window(left=3, right=0) ", ls.Causal() & ls.Window(3, 0)),
        ("Segments([[0, 0, 1, -1]])", ls.Segments(np.array([[0, 0, 1, -1]]))),
        ("Global(q_flags=[[True, False]], rows=True)", ls.Global(q_flags=np.array([[True, False]]))),
        ("TokenTypes([[1, 2]], zero='none')", ls.TokenTypes(np.array([[1, 2]]), zero="none")),
        ("longformer(3, causal=True)", ls.longformer(3, causal=True)),
        ("Causal(-1)", ls.Causal(-1)),
    ],
)
def test_other_spellings(text, mask):
    assert parse(text) == mask


def test_arrays_come_from_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids = np.array([[0, 0, 1, 1, 1]], np.int32)
    np.save("ids.npy", ids)
    assert parse('Causal() & Segments("ids.npy")') == ls.Causal() & ls.Segments(ids)
    assert parse(f"Segments({str(tmp_path / 'ids.npy')!r})") == ls.Segments(ids)
    np.save("objects.npy", np.array([{}, []], object), allow_pickle=True)
    np.savez("arrays.npz", ids)
    (tmp_path / "arrays.npz").rename("arrays.npy")
    (tmp_path / "text.npy").write_text("hello")
    for name in ("objects.npy", "text.npy", "arrays.npy"):
        with pytest.raises(ValueError, match=f"{name}: it is not a file of `np.save`, or it contains Python obje"):
            parse(f"Segments('{name}')")
    with pytest.raises(ValueError, match=r"^other.npy: the file does not exist.$"):
        parse("Segments('other.npy')")


def test_an_array_that_is_only_claimed_is_not_made_room_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    header = {"descr": "<i8", "fortran_order": False, "shape": (1, 10**15)}
    with open("claimed.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(ValueError, match=r"^claimed.npy: "):
        parse("Segments('claimed.npy')")


def test_bigbird_draws_its_blocks_and_takes_the_length():
    drawn = ls.bigbird_random_blocks(1024, block_size=64, num_random_blocks=3, num_heads=2, seed=5)
    expected = ls.bigbird(1024, block_size=64, rand_attn=drawn)
    assert parse("bigbird(1024, num_heads=2, seed=5)") == expected
    assert parse("bigbird(num_heads=2, seed=5)", 1024) == expected
    with pytest.raises(ValueError, match=re.escape("bigbird: its length is missing. Write bigbird(4096), or give -T.")):
        parse("bigbird()")


BIGBIRDS = {
    "bigbird(64000000, block_size=1)": "bigbird: 64,000,000 tokens in blocks of 1 are 64,000,000 blocks, more than "
    "16,384. Give block_size=4000, or fewer tokens.",
    "bigbird(1000000007, block_size=1)": "are 1,000,000,007 blocks, more than 16,384. Give fewer tokens.",
    "bigbird(4096, num_heads=100000000)": "100,000,000 heads of 64 blocks with 3 random blocks each draw "
    "70,400,000,000 numbers, more than 4,194,304. Give fewer heads or random blocks, or a larger block_size.",
    "bigbird(4096, num_random_blocks=1000000000)": "draw 128,000,000,320 numbers, more than 4,194,304.",
    "bigbird(1000000000, block_size=200000000)": "bigbird: block_size must be at most 16,384, got 200,000,000. Give a "
    "smaller one.",
}


@pytest.mark.parametrize("text", BIGBIRDS)
def test_a_bigbird_without_end_is_refused_before_it_is_drawn(text):
    with pytest.raises(ValueError, match=re.escape(BIGBIRDS[text])):
        parse(text)


def test_the_block_size_that_is_advised_works():
    mask = parse("bigbird(64000000, block_size=4000)")
    assert isinstance(mask, ls.Mask)


def test_out_of_memory_is_not_called_nested(monkeypatch):
    """Python's parser raises MemoryError if its stack is full. Any other MemoryError means a lack of memory."""
    with pytest.raises(ValueError, match=r"^The expression is nested too deeply\.$"):
        parse("~" * 15_000 + "Causal()")

    def fails(*_, **__):
        raise MemoryError("Unable to allocate 9 EiB")

    monkeypatch.setattr(ls, "bigbird_random_blocks", fails)
    with pytest.raises(MemoryError, match="9 EiB"):
        parse("bigbird(4096)")


HOSTILE = {
    "__import__('os').system('echo hello')": "is not the name of a mask",
    "open('secrets')": "'open' is not a mask",
    "Causal.__class__()": "'Causal.__class__' is not the name of a mask",
    "ls.os.system('x')": "'ls.os.system' is not the name of a mask",
    "ls.cache()": "'cache' is not a mask",
    "ls.attention(1, 2, 3)": "'attention' is not a mask",
    "Mask()": "'Mask' is not a mask",
    "(lambda: Causal())()": "is not the name of a mask",
    "[Causal() for _ in range(9)]": "is neither a mask nor",
    "[open('x')]": "is not an array",
    "[1, 'a']": "is not an array",
    "[[1, 2], [3]]": "is not an array",
    "Window(*[1, 2])": "'*' is not allowed in arguments",
    "Window(**{'left': 1})": "'*' is not allowed in arguments",
    "Window(2**70, 0)": "is neither a mask nor",
    "Window(10**10**10, 0)": "is neither a mask nor",
    "Window(f'{1}', 0)": "is neither a mask nor",
    "Window(x := 3, 0)": "is neither a mask nor",
    "Window(3, 0) if 1 else Causal()": "is neither a mask nor",
    "Causal() and Window(3, 0)": "not with 'and', 'or' and 'not'",
    "not Causal()": "not with 'and', 'or' and 'not'",
    "Causal() + Causal()": "is neither a mask nor",
    "Causal": "is a name without arguments",
    "Causal() & 3": "'3' is not a mask, and only masks compose",
    "~3": "'3' is not a mask",
    "3": "is not a mask. Write one",
    "'Causal()'": "is not a mask. Write one",
    "": "is not an expression",
    "   ": "is not an expression",
    "Causal(": "is not an expression",
    "Causal()\nimport os": "is not an expression",
    "Causal()\0": "is not an expression",
    "Segments(i32[1,7])": "is the printed form of an array",
    "Custom(lambda q, k: k <= q)": "Custom takes a function",
    "Causal(offset=1, offset=2)": "Causal: offset= is given more than once. Give it once.",
    "Causal(offset=1, offset=1)": "Causal: offset= is given more than once. Give it once.",
    "Causal(1, offset=2)": "Causal: ",
    "bigbird(4096, seed=1, seed=2)": "bigbird: seed= is given more than once. Give it once.",
    "Full() & Window(left=1, right=2, left=3)": "Window: left= is given more than once. Give it once.",
    "bigbird(4096, num_random_blocks='a')": "`num_random_blocks` must be a Python int >= 0, got 'a'.",
    "Causal(\udcff)": "is not UTF-8 text, at character 7.",
    "Window()": "Window: ",
    "Window('a', 0)": "Window: ",
    "Window(1.5, 0)": "Window: ",
    "Window(-1, 0)": "Window: ",
    "Window(3, 0, wide=True)": "Window: ",
    "Window(True, 0)": "Window: ",
    "Chunk(0)": "Chunk: ",
    "PerHead(Causal())": "PerHead: ",
    "PerHead(())": "PerHead: ",
    "Segments([0.5])": "Segments: ",
    "Segments('no ids')": "Segments: ",
    "Global('a')": "Global: ",
    "bigbird(100, block_size=0)": "bigbird: ",
    "bigbird('a')": "bigbird: ",
    "longformer()": "longformer: ",
    "longformer('x')": "longformer: ",
    "Window(" + "9" * 5000 + ", 0)": "is not an expression",
    "~" * 15_000 + "Causal()": "nested too deeply",
    "(" * 5_000 + "Causal()" + ")" * 5_000: "",
    " & ".join(["Causal()"] * 2_200): "",
    "Causal()" + " " * 30_000: "",
    "Causal() & " + "Causal()" * 9_000: "The expression must have at most 20,000 characters",
    "Gl\N{CYRILLIC SMALL LETTER O}bal((0,))": "is not a mask",
}


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:30]))
def test_nothing_else_is_read_and_the_error_says_why(text, unchecked):
    try:
        mask = parse(text)
    except ValueError as error:
        assert HOSTILE[text] in str(error)
        assert len(str(error)) < 2000
    else:
        assert HOSTILE[text] == "" and isinstance(mask, ls.Mask)


@given(st.text(max_size=40))
def test_any_text_is_a_mask_or_an_error(text):
    try:
        assert isinstance(parse(text), ls.Mask)
    except ValueError as error:
        assert str(error)


PIECES = st.sampled_from([
    "Causal", "Window", "Global", "PerHead", "bigbird", "longformer", "Segments", "(", ")", "[", "]", ",", "0", "1",
    "-1", "&", "|", "~", "'a.npy'", "None", "True", "=", "left", "9999999999999999999999", "1e400", "1j", "b'x'", "...",
])  # fmt: skip


@given(st.lists(PIECES, max_size=14).map(" ".join))
def test_any_jumble_of_pieces_is_a_mask_or_an_error(text):
    try:
        assert isinstance(parse(text), ls.Mask)
    except ValueError as error:
        assert str(error)
