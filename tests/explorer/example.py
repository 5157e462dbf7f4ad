"""The example document that the page's tests load: `python -m tests.explorer.example` writes it."""

import json
from pathlib import Path

import numpy as np

import longspan as ls
from longspan.explorer.document import document

PATH = Path(__file__).with_name("example.json")


def ids():
    """The documents of the tokens."""
    return np.repeat(np.arange(4), (20, 30, 40, 6))[None]


def mask_of():
    """A mask, and another one."""
    mask = ls.Causal() & (ls.Window(7, 0) | ls.Global((0, 5), rows=False)) & ls.Segments(ids())
    return mask, ls.Causal() & ls.Window(7, 0) & ls.Segments(ids())


def made():
    mask, other = mask_of()
    tokens = [f"t{i}" for i in range(94)] + ["</script><b>\"'&", "<!--\u2028"]
    found = document(mask, 96, tokens=tokens, other=other)
    return found | dict(longspan="")


if __name__ == "__main__":
    PATH.write_text(json.dumps(made(), ensure_ascii=True, separators=(",", ":")) + "\n", "utf-8")
