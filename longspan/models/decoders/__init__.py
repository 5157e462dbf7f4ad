"""Decoders: one file per family; `causal_lm`, `layer`, `attention`, `runs` and `rope` are shared by all families."""
