"""Encoders: one file per family; `encoder`, `attention` and `tasks` are shared by all families."""
