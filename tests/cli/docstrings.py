"""Pairs of a docstring and the body of its function, from the sources of the standard library."""

import ast
import json
import re

from longspan.train.sources import standard_library

LONGEST = 200  # characters


def docstring_pairs():
    """The first paragraph of each docstring as the anchor and the function's body as the positive."""
    seen = set()
    for example in standard_library():
        for node in ast.walk(ast.parse(example.texts["text"])):
            if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
                continue
            text = (ast.get_docstring(node) or "").partition("\n\n")[0]
            body = "\n".join(map(ast.unparse, node.body[1:]))
            if len(text) > 20 and len(body) > 40 and text not in seen:
                seen.add(text)
                yield dict(anchor=text[:LONGEST], positive=body[:LONGEST])


def recalls(run, err):
    """recall_at_1 before training, and of the evaluations of a run."""
    before = re.search(r"before training: .*recall_at_1 ([\d.]+)", err)
    assert before is not None, err
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    found = [record["recall_at_1"] for record in map(json.loads, lines) if "recall_at_1" in record]
    return float(before[1]), found
