"""The implementations that `bench` times compute the same attention."""

import numpy as np
import pytest

import longspan as ls
from longspan.cli import timing
from longspan.cli.timing import Problem, implementations_of
from longspan.testing import Shape, make_qkv

RULES = [
    ls.Causal() & ls.Window(20, 0),
    ls.Window(9, 3) | ls.Global((0, 31)),
    ls.Causal() & (ls.Window(7, 0, dilation=3) | ls.Prefix(4)) & ~ls.Chunk(8),
    ls.BlockCausal(16) | ls.Empty(),
]
TABLES = [
    ls.Causal() & ls.Segments(np.repeat(np.arange(4), 16)[None]),
    ls.PerHead((ls.Causal(), ls.Window(5, 5))),
    ls.Blocks(np.array([[[0], [0], [1], [2]]]), 16),
]
LENGTH = 64


class Numpy:
    """The part of PyTorch that a mask table needs."""

    from_numpy = staticmethod(np.asarray)


@pytest.mark.parametrize("mask", [*RULES, *TABLES], ids=repr)
def test_a_mask_as_a_function_is_the_mask(mask):
    function = timing._mask_function(Numpy, Problem(mask, LENGTH, 2, 8, False))
    place = np.arange(LENGTH)
    heads = np.stack([function(0, head, place[:, None], place[None]) for head in range(mask.heads)])
    np.testing.assert_array_equal(heads, np.asarray(mask.dense(LENGTH, LENGTH))[0])


def test_rules_stay_rules_and_what_is_too_large_for_a_table_is_left_out(monkeypatch):
    monkeypatch.setattr(timing, "MAX_DENSE_BYTES", 0)
    assert timing._mask_function(Numpy, Problem(RULES[0], LENGTH, 2, 8, False)) is not None
    assert timing._mask_function(Numpy, Problem(TABLES[0], LENGTH, 2, 8, False)) is None


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")  # warnings of PyTorch's compiler
@pytest.mark.parametrize("mask", [RULES[1], TABLES[0], TABLES[1]], ids=repr)
def test_flex_attention_computes_what_we_do(mask):
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()  # each mask is compiled as in a process of its own, without dynamic shapes
    problem = Problem(mask, LENGTH, 2, 16, False)
    found = implementations_of(problem, ["reference"], peers=True)
    assert not isinstance(found["FlexAttention"], str), found["FlexAttention"]
    q, k, v = make_qkv(Shape(1, LENGTH, LENGTH, 2, 2, 16), np.float32)
    want = ls.attention(q, k, v, mask=mask, engine="reference")
    got = found["FlexAttention"].run().numpy().swapaxes(1, 2)
    np.testing.assert_allclose(got, np.asarray(want), rtol=0, atol=64 * np.finfo(np.float32).eps)
    backward = implementations_of(problem._replace(backward=True), ["reference"], peers=True)
    assert backward["FlexAttention"] == "it has no backward pass on CPUs"


@pytest.mark.parity
def test_a_failing_compiler_is_told_in_the_row(monkeypatch):
    torch = pytest.importorskip("torch")

    def compiled(function):
        def fail(*args, **more):
            raise RuntimeError("no compiler found\nand more")

        return fail

    monkeypatch.setattr(torch, "compile", compiled)
    found = implementations_of(Problem(RULES[0], LENGTH, 1, 8, False), [], peers=True)
    assert found["FlexAttention"] == "torch.compile: RuntimeError: no compiler found"
