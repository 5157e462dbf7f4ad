// The number of allowed pairs, exactly.

const LEAF = 8; // rectangles of at most this many slots along each side are read pair by pair
const MAX_READ = 2 ** 25; // pairs; beyond, the number is a range

// {pairs, least, greatest}: `pairs` is null if the page does not know every pair, or would have to read too many.
function countPairs(program) {
  const counts = countsByQuery(program, program.rule);
  if (counts !== null) {
    const pairs = counts.reduce((a, b) => a + b, 0);
    return { pairs, least: pairs, greatest: pairs };
  }
  const found = { least: 0, doubtful: 0, read: 0 };
  countRectangle(program.rule, 0, program.q.length, 0, program.kv.length, found);
  const greatest = found.least + found.doubtful;
  return { pairs: found.doubtful ? null : found.least, least: found.least, greatest };
}

function countRectangle(rule, q0, q1, k0, k1, found) {
  if (q0 >= q1 || k0 >= k1) return;
  const kind = rule.classify(q0, q1, k0, k1);
  const area = (q1 - q0) * (k1 - k0);
  if (!(kind & ANY)) return;
  if (kind & ALL) {
    found.least += area;
    return;
  }
  if (found.read > MAX_READ) {
    found.doubtful += area;
    return;
  }
  if (q1 - q0 <= LEAF && k1 - k0 <= LEAF) {
    found.read += area;
    for (let q = q0; q < q1; q++) {
      for (let k = k0; k < k1; k++) {
        const truth = rule.allowed(q, k);
        if (truth) found.least += 1;
        else if (truth === null) found.doubtful += 1;
      }
    }
    return;
  }
  const [q, k] = splitOf(rule, q0, q1, k0, k1);
  countRectangle(rule, q0, q, k0, k, found);
  countRectangle(rule, q0, q, k, k1, found);
  countRectangle(rule, q, q1, k0, k, found);
  countRectangle(rule, q, q1, k, k1, found);
}

// Where to split a rectangle: the middle of its queries, or of its keys, if that makes one half EMPTY or FULL, as around a
// global token; else both. The end of a side stands for no split.
function splitOf(rule, q0, q1, k0, k1) {
  const q = (q0 + q1) >> 1;
  const k = (k0 + k1) >> 1;
  const isSettled = (...rectangle) => rule.classify(...rectangle) !== ANY;
  if (q > q0 && (isSettled(q0, q, k0, k1) || isSettled(q, q1, k0, k1))) return [q, k1];
  if (k > k0 && (isSettled(q0, q1, k0, k) || isSettled(q0, q1, k, k1))) return [q1, k];
  return [q1 - q0 > LEAF ? q : q1, k1 - k0 > LEAF ? k : k1];
}
