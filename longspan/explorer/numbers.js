// Numbers of a program: ints, references to the sliders' numbers, and numbers derived from them.
// Ints are JavaScript numbers, exact far beyond int32: no sum or product here overflows, as none does in Python.

const FAR = 2 ** 30 - 1; // positions and the numbers of rules lie within ±FAR
const LEAST = -(2 ** 31);
const MOST = 2 ** 31 - 1;

const floorDivide = (a, b) => Math.floor(a / b);
const floorModulo = (a, b) => a - b * Math.floor(a / b);
const clamp = (a, low, high) => (a < low ? low : a > high ? high : a);

// The operations of `derived`, with the names of JAX's primitives. The same table is in `jaxprs.py`.
const OPERATIONS = {
  add: (a, b) => a + b,
  sub: (a, b) => a - b,
  mul: (a, b) => a * b,
  neg: (a) => -a,
  abs: Math.abs,
  sign: Math.sign,
  max: Math.max,
  min: Math.min,
  div: (a, b) => Math.trunc(a / b),
  rem: (a, b) => a % b,
  eq: (a, b) => Number(a === b),
  ne: (a, b) => Number(a !== b),
  lt: (a, b) => Number(a < b),
  le: (a, b) => Number(a <= b),
  gt: (a, b) => Number(a > b),
  ge: (a, b) => Number(a >= b),
  and: (a, b) => a & b,
  or: (a, b) => a | b,
  xor: (a, b) => a ^ b,
  not: (a) => 1 - a,
  select_n: (which, ...cases) => cases[which],
  clamp: (least, a, greatest) => clamp(a, least, greatest),
};

// The value of every number: {n: the sliders' values, v: derived ones, d: those of arrays}.
function numberValues(page, sliders) {
  const values = { n: sliders.map((value) => clamp(value, -FAR, FAR)), v: [], d: page.data };
  const operand = (x) => (Array.isArray(x) ? values[x[0]][x[1]] : x);
  for (const [operation, ...operands] of page.derived) {
    values.v.push(OPERATIONS[operation](...operands.map(operand)));
  }
  return values;
}

// A number as rules read it: {value, isStatic, source}. Two numbers are the same if both are static and equal, or if both
// come from one array.
function readNumber(values, number) {
  if (!Array.isArray(number)) return { value: clamp(number, -FAR, FAR), isStatic: true, source: null };
  const [kind, index] = number;
  const value = clamp(values[kind][index], -FAR, FAR) + 0; // + 0: never -0
  return { value, isStatic: kind !== "d", source: kind === "d" ? index : null };
}

const isSameNumber = (a, b) =>
  a === b || (a !== null && b !== null && a.isStatic === b.isStatic && a.source === b.source && (a.source !== null || a.value === b.value));
const isStatic = (number, value) => number.isStatic && number.value === value;
