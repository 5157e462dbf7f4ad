// A mask of the document with the values of its numbers: the lowered program, and the user's expression.

class Program {
  constructor(page, mask, sliders, arrays) {
    this.page = page;
    this.mask = mask;
    this.values = numberValues(page, sliders);
    this.arrayOf = (index) => (arrays[index] ??= new Entries(page.arrays[index]));
    const positions = [page.q_positions, page.kv_positions].map((i) => (i === null ? null : this.arrayOf(i).entries));
    this.q = new Side(page.q_len, positions[0]);
    this.kv = new Side(page.kv_len, positions[1]);
    this.differing = null; // the number of differing keys of each query: see `findDifference`
    this.asEngine = false; // whether rules without bounds classify every tile as PARTIAL, as engines see them
    this.rule = ruleOf(mask.program, this);
    this.tree = this.ruled(mask.tree);
  }

  ruled(tree) {
    if (tree.op === "leaf") return { ...tree, rule: ruleOf(tree.program, this) };
    return { ...tree, parts: tree.parts.map((part) => this.ruled(part)) };
  }

  allowed(q, k) {
    return this.rule.allowed(q, k);
  }

  classify(q0, q1, k0, k1) {
    return this.rule.classify(q0, q1, k0, k1);
  }
}

// {allowed, text, op, parts} of each part of the user's expression, for one pair.
function whyTree(tree, q, k, textOf) {
  const text = textOf(tree.start, tree.stop);
  if (tree.op === "leaf") return { op: "leaf", leaf: tree.leaf, text, allowed: tree.rule.allowed(q, k) };
  const parts = tree.parts.map((part) => whyTree(part, q, k, textOf));
  const truths = parts.map((part) => part.allowed);
  const node = { op: tree.op, text, allowed: combined(tree.op, truths), parts };
  return tree.op === "per_head" ? { ...node, head: tree.head, heads: tree.heads } : node;
}

function combined(op, truths) {
  if (op === "not") return truths[0] === null ? null : !truths[0];
  if (op === "per_head") return truths[0];
  const decisive = op === "or"; // one such part decides
  if (truths.includes(decisive)) return decisive;
  return truths.includes(null) ? null : !decisive;
}
