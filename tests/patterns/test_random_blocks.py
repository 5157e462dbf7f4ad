"""`bigbird_random_blocks` against the draws of Hugging Face."""

import json
from pathlib import Path

import numpy as np
import pytest

import longspan as ls

GOLDEN = Path(__file__).parent.parent / "golden" / "bigbird_random_blocks.json"


def blocks(seq_len, block_size, num_random_blocks, num_heads, seed, max_seq_len, **options):
    return ls.bigbird_random_blocks(
        seq_len,
        block_size=block_size,
        num_random_blocks=num_random_blocks,
        num_heads=num_heads,
        seed=seed,
        max_seq_len=max_seq_len,
        **options,
    )


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text("utf-8")), ids=lambda case: "-".join(map(str, case[:-1])))
def test_draws_equal_hugging_face(case):
    *arguments, drawn = case
    got = blocks(*arguments)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, drawn)


def test_other_lengths_draw_only_among_the_first_blocks():
    drawn = blocks(64 * 40, 64, 3, 4, seed=5, max_seq_len=4096)
    assert drawn.shape == (4, 38, 3)
    assert drawn.min() >= 1 and drawn.max() <= 2 * 3 + 3


def test_generated_plans_never_draw_neighbours_globals_or_a_block_twice():
    for seed in range(20):
        for rows in blocks(3 * 17, 3, 3, 2, seed=seed, max_seq_len=4096).tolist():
            for i, row in enumerate(rows, start=1):
                assert not set(row) & {0, i - 1, i, i + 1, 16} and len(set(row)) == 3


def test_the_original_code_has_one_more_legacy_length():
    arguments = dict(block_size=64, num_random_blocks=3, num_heads=2, seed=1)
    theirs = ls.bigbird_random_blocks(2048, **arguments, legacy_lengths=(1024, 2048, 3072, 4096))
    whole = ls.bigbird_random_blocks(4096, **arguments)
    np.testing.assert_array_equal(theirs, whole[:, :30])
    assert (ls.bigbird_random_blocks(2048, **arguments) != theirs).any()


def test_numpys_global_generator_is_not_used():
    np.random.seed(7)  # noqa: NPY002
    wanted = np.random.RandomState(7).rand()
    blocks(768, 64, 3, 2, seed=0, max_seq_len=4096)
    assert np.random.rand() == wanted  # noqa: NPY002


@pytest.mark.parity
def test_draws_equal_hugging_face_live():
    pytest.importorskip("transformers")
    from tests.golden.make_bigbird_random_blocks import hugging_face_blocks

    cases = [(T, size, r, 1 + r, T // 64 + r, 4096) for T in (1024, 3072, 4096) for size in (32, 64) for r in (1, 2, 3)]
    cases += [((2 * r + 6 + more) * 8, 8, r, 2, more, 512) for r in (1, 2, 3, 4) for more in (0, 1, 7)]
    for case in cases:
        np.testing.assert_array_equal(blocks(*case), hugging_face_blocks(*case), err_msg=str(case))
