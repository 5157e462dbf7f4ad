"""A subclass that overrides `allowed` is another rule: it does not inherit the properties of its parent."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.masks import rule
from longspan.testing import Shape, assert_matches_reference, assert_obeys_laws, make_qkv

pytestmark = pytest.mark.quick


@rule
class Heard(ls.Causal):
    """Causal, and the key is flagged: by slot too, though its parent is by position."""

    flags: Any = None

    def allowed(self, q, kv):
        return super().allowed(q, kv) & kv.take(self.flags)


@rule
class LoudSegments(ls.Segments):
    loud: Any = None

    def allowed(self, q, kv):
        return super().allowed(q, kv) & q.take(self.loud)


@rule
class Tail(ls.KvLengths):
    """The keys that its parent does not allow."""

    def allowed(self, q, kv):
        return ~super().allowed(q, kv)


@rule
class Acausal(ls.Causal):
    """A subclass with `allowed` and `classify`, which the parent's band must not override."""

    def allowed(self, q, kv):
        return kv.position >= q.position

    def classify(self, q, kv):
        return kv.last >= q.first, kv.first >= q.last


FLAGS = (np.arange(11) % 3 != 1)[None]
IDS = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2, -1, 2]])
MASKS = [Heard(0, FLAGS), LoudSegments(IDS, None, FLAGS), Tail(np.array([4])), Acausal()]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("other", [ls.Full(), ls.Window(4, 4)], ids=repr)
def test_laws_and_engines_hold(mask, other):
    assert_obeys_laws(mask & other, 11, 11)
    q, k, v = make_qkv(Shape(B=1, T=11, S=11, N=2, K=1, H=4), jnp.float32)
    assert_matches_reference(["cpu", "xla"] if ls.explain(q, k, v).engine == "cpu" else ["xla"], q, k, v, mask & other)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_a_cut_allows_the_pairs_of_the_rule(mask):
    q, kv = np.array([4, 5, 9, 10]), np.array([1, 2, 3, 8, 10])
    want = np.asarray(mask.dense(11, 11))[0, 0][np.ix_(q, kv)]
    got = mask.cut(q, kv).dense(4, 5, q_positions=q, kv_positions=kv)
    np.testing.assert_array_equal(np.asarray(got)[0, 0], want)


def test_attributes_defined_by_the_subclass_apply():
    assert Heard(0, FLAGS).reads == {"position", "slot"} and ls.Causal().reads == {"position"}
    assert Acausal().atoms() == Acausal()
    assert Acausal().reads_q_place and not Acausal().unbounded()
    assert Heard(0, FLAGS).unbounded() == (Heard(0, FLAGS),)
    assert ls.Window(3, 0).reads == {"position"} and ls.Window(3, 0).layout(512, 512).visits() == 7


def plain(base, **members):
    """A class without `@rule`."""
    return type("Plain", (base,), dict(allowed=lambda self, q, kv: q.position >= kv.position, **members))


def with_own_fields(self, size):
    self.size = size


@pytest.mark.parametrize(
    "make",
    [
        lambda: plain(ls.Mask)(),
        lambda: plain(ls.Mask, __init__=with_own_fields)(3),
        lambda: dataclasses.dataclass(frozen=True)(plain(ls.Mask))(),
        lambda: plain(ls.masks.Rule)(),
        lambda: plain(ls.Bias)(),
        lambda: plain(ls.Causal)(),  # the parent has `@rule`
        lambda: plain(Acausal)(),
        ls.Mask,
    ],
    ids=["mask", "own init", "dataclass", "rule", "bias", "leaf", "users rule", "the base"],
)
def test_a_class_without_the_decorator_is_refused_with_what_to_write(make):
    with pytest.raises(TypeError, match=r"The class (Plain|Mask) has no `@rule`. Write `@longspan.masks.rule` above"):
        make()
