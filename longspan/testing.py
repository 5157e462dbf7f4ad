"""Parity and law helpers that we test ourselves with, for people who add a mask or an engine.

Example:
    >>> q, k, v = make_qkv(Shape(B=1, T=7, S=11, N=6, K=3, H=5), jnp.float32)
    >>> assert_matches_reference("reference", q, k, v, Causal())
"""
