"""Runs the page's scripts in Node: one process answers the questions about all documents of a test."""

import json
import shutil
import subprocess

import pytest

from longspan.explorer.scripts import evaluator

NODE = shutil.which("node") or shutil.which("nodejs")
needs_node = pytest.mark.skipif(NODE is None, reason="Node is not installed: it runs the page's scripts in tests")

# Each question is [method, ...arguments] of `makeExplorer(document)`. `dense` is a string of 1, 0 and ? per row.
ANSWER = """
const answers = JSON.parse(require("fs").readFileSync(0, "utf-8")).map(({ document, questions }) => {
  const explorer = makeExplorer(document);
  return questions.map(([method, ...given]) => {
    try {
      if (method === "dense") return dense(explorer, document);
      if (method === "set") return explorer.setNumbers(given[0]), explorer.text;
      return explorer[method](...given) ?? null;
    } catch (error) {
      return { error: String(error.stack) };
    }
  });
});

function dense(explorer, { q_len, kv_len }) {
  const rows = [];
  for (let q = 0; q < q_len; q++) {
    let row = "";
    for (let k = 0; k < kv_len; k++) row += { true: "1", false: "0", null: "?" }[explorer.allowed(q, k)];
    rows.push(row);
  }
  return rows;
}
process.stdout.write(JSON.stringify(answers));
"""


def ask(documents, questions):
    """The answers to the questions about each document: questions[i] is a list about documents[i]."""
    asked = [dict(document=d, questions=q) for d, q in zip(documents, questions, strict=True)]
    done = subprocess.run(
        [NODE, "-e", evaluator() + ANSWER], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
