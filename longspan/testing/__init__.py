"""Longspan's own test helpers, for users who add a mask or an engine.

`assert_matches_reference` compares an engine with float64. `assert_obeys_laws` checks that a mask's methods for pairs,
tiles and rows of tiles agree. `masks` is a Hypothesis strategy for compositions of every rule.

Example:
    >>> q, k, v = make_qkv(Shape(B=1, T=7, S=11, N=6, K=3, H=5), jnp.float32)
    >>> assert_matches_reference("reference", q, k, v, ls.Causal())
    >>> assert_obeys_laws(ls.Causal() & ls.Window(2, 0), 7, 11)
"""

from longspan.testing.laws import assert_obeys_laws as assert_obeys_laws
from longspan.testing.parity import Shape as Shape
from longspan.testing.parity import assert_matches_reference as assert_matches_reference
from longspan.testing.parity import make_qkv as make_qkv
from longspan.testing.strategies import masks as masks
