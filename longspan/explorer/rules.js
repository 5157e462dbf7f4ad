// Rules: the nodes of a program, evaluated for pairs, for rectangles, and as spans of keys for rows of tiles.
//
// `allowed(q, k)` is true, false, or null if the page does not know. `classify(q0, q1, k0, k1)` bounds the rectangle of
// queries [q0, q1) and keys [k0, k1): ANY if some pair may be allowed, ALL if every pair must be; `0` is EMPTY,
// `ANY | ALL` is FULL, `ANY` is PARTIAL. Both equal `allowed` and `classify` of `masks/`. `spans` are in `spans.js`.

const ANY = 1;
const ALL = 2;
const FULL = ANY | ALL;

const HOLDS = {
  "<=": (a, b) => a <= b,
  ">=": (a, b) => a >= b,
  "<": (a, b) => a < b,
  ">": (a, b) => a > b,
  "==": (a, b) => a === b,
};

// The rule of a node. `program` has both sides, the values of numbers, the arrays, and `asEngine`.
function ruleOf(node, program) {
  if (node.op === "and") return new AndRule(node.parts.map((part) => ruleOf(part, program)));
  if (node.op === "or") return new OrRule(node.parts.map((part) => ruleOf(part, program)));
  if (node.op === "not") return new NotRule(ruleOf(node.part, program));
  if (node.op === "compare") return new CompareRule(node, program);
  if (node.op === "blocks") return new BlocksRule(node, program);
  if (node.op === "dense") return new DenseRule(node, program);
  if (node.op === "cells") return new CellsRule(node, program);
  return new ConstantRule(node.op === "full");
}

class ConstantRule {
  constructor(truth) {
    this.truth = truth;
    this.isMonotone = true;
  }

  allowed() {
    return this.truth;
  }

  classify() {
    return this.truth ? FULL : 0;
  }
}

class AndRule {
  constructor(parts) {
    this.parts = parts;
    this.isMonotone = parts.every((part) => part.isMonotone);
  }

  allowed(q, k) {
    let found = true;
    for (const part of this.parts) {
      const truth = part.allowed(q, k);
      if (truth === false) return false;
      if (truth === null) found = null;
    }
    return found;
  }

  classify(q0, q1, k0, k1) {
    let found = FULL;
    for (const part of this.parts) {
      found &= part.classify(q0, q1, k0, k1);
      if (found === 0) return 0;
    }
    return found;
  }
}

class OrRule {
  constructor(parts) {
    this.parts = parts;
    this.isMonotone = parts.every((part) => part.isMonotone);
  }

  allowed(q, k) {
    let found = false;
    for (const part of this.parts) {
      const truth = part.allowed(q, k);
      if (truth === true) return true;
      if (truth === null) found = null;
    }
    return found;
  }

  classify(q0, q1, k0, k1) {
    let found = 0;
    for (const part of this.parts) {
      found |= part.classify(q0, q1, k0, k1);
      if (found === FULL) return FULL;
    }
    return found;
  }
}

class NotRule {
  constructor(part) {
    this.part = part;
    this.isMonotone = part.isMonotone;
  }

  allowed(q, k) {
    const truth = this.part.allowed(q, k);
    return truth === null ? null : !truth;
  }

  classify(q0, q1, k0, k1) {
    const found = this.part.classify(q0, q1, k0, k1);
    return (found & ALL ? 0 : ANY) | (found & ANY ? 0 : ALL);
  }
}

// Allows the pairs whose query term is <=, >=, <, > or == the key term, if both are valid.
class CompareRule {
  constructor(node, program) {
    this.q = new Term(node.q, program.q, program.values, program.arrayOf);
    this.kv = new Term(node.kv, program.kv, program.values, program.arrayOf);
    this.relation = node.relation;
    this.few = node.few;
    this.holds = HOLDS[node.relation];
    this.columnTile = this.columnBounds = null; // see `boundsOfColumns`
    this.isStrided = this.q.modulo !== null && this.isByDistance();
    // A run of slots without valid entries has a wider range than the runs around it if there is a modulo.
    this.isMonotone = [this.q, this.kv].every((term) => term.valid == null || term.round === null);
  }

  // Whether it allows distances that are multiples of a number: distances bound tiles better than residues.
  isByDistance() {
    const { q, kv } = this;
    const isPlain = q.of === "position" && kv.of === "position" && this.relation === "==" && isStatic(q.divide, 1);
    const pairs = [[q.divide, kv.divide], [q.modulo, kv.modulo], [q.plus, kv.plus]];
    return isPlain && pairs.every(([mine, theirs]) => isSameNumber(mine, theirs));
  }

  allowed(q, k) {
    return this.holds(this.q.value(q), this.kv.value(k)) && this.q.defined(q) && this.kv.defined(k);
  }

  classify(q0, q1, k0, k1) {
    const { q, kv } = this;
    if (this.isStrided) return this.classifyDistance(q0, q1, k0, k1);
    q.range(q0, q1);
    kv.range(k0, k1);
    const kind = this.kindOf(q.low, q.high, kv.low, kv.high);
    return q.total && kv.total ? kind : kind & ANY;
  }

  // The kind of a tile whose query terms are in [q0, q1] and whose key terms are in [k0, k1], all of them valid.
  kindOf(q0, q1, k0, k1) {
    const { relation, holds } = this;
    if (relation === "==") return (q0 <= k1 && k0 <= q1 ? ANY : 0) | (q0 === q1 && k0 === k1 && q0 === k0 ? ALL : 0);
    if (relation === "<=" || relation === "<") return (holds(q0, k1) ? ANY : 0) | (holds(q1, k0) ? ALL : 0);
    return (holds(q1, k0) ? ANY : 0) | (holds(q0, k1) ? ALL : 0);
  }

  classifyDistance(q0, q1, k0, k1) {
    const step = this.q.round;
    const least = this.kv.side.first(k0, k1) - this.q.side.last(q0, q1);
    const most = this.kv.side.last(k0, k1) - this.q.side.first(q0, q1);
    const any = floorDivide(most, step) * step >= least;
    const all = (least === most && floorModulo(least, step) === 0) || step === 1;
    return (any ? ANY : 0) | (all ? ALL : 0);
  }
}

// Allows the block pairs that a table lists.
class BlocksRule {
  constructor(node, program) {
    const { entries, shape } = program.arrayOf(node.table);
    [this.count, this.columns] = shape;
    this.unit = readNumber(program.values, node.size).value;
    this.table = entries;
    this.lists = [];
    for (let row = 0; row < this.count; row++) {
      const listed = entries.subarray(row * this.columns, (row + 1) * this.columns).filter((block) => block >= 0);
      this.lists.push([...new Set(listed)].sort((a, b) => a - b));
    }
    this.first = new Ranges(this.lists.map((list) => list[0] ?? MOST));
    this.last = new Ranges(this.lists.map((list) => list[list.length - 1] ?? -1));
    this.isMonotone = true;
  }

  row(block) {
    return clamp(block, 0, this.count - 1);
  }

  allowed(q, k) {
    if (!this.count) return false;
    const list = this.lists[this.row(floorDivide(q, this.unit))];
    const block = floorDivide(k, this.unit);
    return list[bisect(list, block)] === block;
  }

  classify(q0, q1, k0, k1) {
    if (!this.count) return 0;
    const top = this.row(floorDivide(q0, this.unit));
    const bottom = this.row(floorDivide(q1 - 1, this.unit));
    const left = floorDivide(k0, this.unit);
    const right = floorDivide(k1 - 1, this.unit);
    if (this.first.least(top, bottom + 1) > right || this.last.greatest(top, bottom + 1, -1) < left) return 0;
    let any = false;
    let all = true;
    for (let row = top; row <= bottom && (all || !any); row++) {
      const list = this.lists[row];
      const inside = bisect(list, right, "right") - bisect(list, left);
      any ||= inside > 0;
      all &&= inside === right - left + 1;
    }
    return (any ? ANY : 0) | (all ? ALL : 0);
  }
}

// Allows the pairs for which an array of bools is true; with offsets, the array is placed there.
class DenseRule {
  constructor(node, program) {
    const { entries, shape } = program.arrayOf(node.array);
    this.bools = entries;
    [this.rows, this.columns] = shape;
    this.offsets = [node.q_offset, node.kv_offset].map((n) => n === null ? null : readNumber(program.values, n).value);
    this.areas = new Areas(entries, this.rows, this.columns);
    this.isMonotone = true;
  }

  // Whether the one entry along a side is for all slots of the side.
  isBroadcast(axis) {
    return this.offsets[axis] === null && [this.rows, this.columns][axis] === 1;
  }

  place(slot, axis) {
    return this.isBroadcast(axis) ? 0 : slot - (this.offsets[axis] ?? 0);
  }

  allowed(q, k) {
    const row = this.place(q, 0);
    const column = this.place(k, 1);
    if (row < 0 || row >= this.rows || column < 0 || column >= this.columns) return false;
    return this.bools[row * this.columns + column] === 1;
  }

  classify(q0, q1, k0, k1) {
    const [top, bottom, height] = this.along(q0, q1, 0, this.rows);
    const [left, right, width] = this.along(k0, k1, 1, this.columns);
    const inside = this.areas.count(top, bottom, left, right);
    return (inside > 0 ? ANY : 0) | (inside === height * width ? ALL : 0);
  }

  along(start, stop, axis, size) {
    if (this.isBroadcast(axis)) return [0, 1, 1];
    const offset = this.offsets[axis] ?? 0;
    return [clamp(start - offset, 0, size), clamp(stop - offset, 0, size), stop - start];
  }
}

// A rule that Python evaluated in cells.
class CellsRule {
  constructor(node, program) {
    this.program = program;
    this.bounded = node.bounded;
    this.sizes = [node.q_cell, node.kv_cell];
    this.some = new DenseRule({ array: node.some, q_offset: 0, kv_offset: 0 }, program);
    this.every = new DenseRule({ array: node.every, q_offset: 0, kv_offset: 0 }, program);
    this.isMonotone = true;
  }

  allowed(q, k) {
    const row = floorDivide(q, this.sizes[0]);
    const column = floorDivide(k, this.sizes[1]);
    if (this.every.allowed(row, column)) return true;
    return this.some.allowed(row, column) ? null : false;
  }

  classify(q0, q1, k0, k1) {
    if (this.program.asEngine && !this.bounded) return ANY;
    const [height, width] = this.sizes;
    const cells = [floorDivide(q0, height), floorDivide(q1 - 1, height) + 1, floorDivide(k0, width), floorDivide(k1 - 1, width) + 1];
    return (this.some.classify(...cells) & ANY) | (this.every.classify(...cells) & ALL);
  }
}
