"""Decoders: one file per family, around the parts they share (`causal_lm`, `layer`, `attention`, `runs`, `rope`)."""
