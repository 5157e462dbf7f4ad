"""Encoders: one file per family, around the parts they share (`encoder`, `attention`, `tasks`)."""
