"""Thin Flax modules: `longspan.nn.linen` and `longspan.nn.nnx` have the same names, arguments and parameter trees.

Flax is imported by those two only: it is an optional dependency (`pip install longspan[flax]`).
"""
