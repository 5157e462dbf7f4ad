// Arrays of the document, and their least and greatest entries over runs of slots.

// The typed array of an entry of `page.arrays`; bools are 0 and 1.
function decodeArray(entry) {
  return entry.data === undefined ? decodeRuns(entry) : decodePlain(entry);
}

const TYPED = { bits: Uint8Array, i8: Int8Array, i16: Int16Array, i32: Int32Array };
const sizeOf = (shape) => shape.reduce((a, b) => a * b, 1);

// Each entry is the one before it, or 0, plus a step; step i is repeated `counts[i]` times.
function decodeRuns({ type, shape, steps, counts }) {
  const entries = new TYPED[type](sizeOf(shape));
  const repeats = decodePlain(counts);
  let at = 0;
  let value = 0;
  decodePlain(steps).forEach((step, i) => {
    for (const stop = at + repeats[i]; at < stop; at++) entries[at] = value += step;
  });
  return entries;
}

function decodePlain({ type, shape, data }) {
  const text = atob(data);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const entries = new TYPED[type](sizeOf(shape));
  const view = new DataView(bytes.buffer);
  for (let i = 0; i < entries.length; i++) {
    if (type === "bits") entries[i] = (bytes[i >> 3] >> (i & 7)) & 1;
    else if (type === "i8") entries[i] = view.getInt8(i);
    else entries[i] = type === "i16" ? view.getInt16(2 * i, true) : view.getInt32(4 * i, true);
  }
  return entries;
}

// The least and greatest entries of any run of an array, by a tree of which each node has two children.
class Ranges {
  constructor(entries) {
    const size = entries.length;
    this.size = size;
    this.low = new Float64Array(2 * size);
    this.high = new Float64Array(2 * size);
    for (let i = 0; i < size; i++) this.low[size + i] = this.high[size + i] = entries[i];
    this.build();
  }

  build() {
    for (let i = this.size - 1; i > 0; i--) {
      this.low[i] = Math.min(this.low[2 * i], this.low[2 * i + 1]);
      this.high[i] = Math.max(this.high[2 * i], this.high[2 * i + 1]);
    }
  }

  least(start, stop, none = MOST) {
    let found = none;
    for (let a = start + this.size, b = stop + this.size; a < b; a >>= 1, b >>= 1) {
      if (a & 1) found = Math.min(found, this.low[a++]);
      if (b & 1) found = Math.min(found, this.low[--b]);
    }
    return found;
  }

  greatest(start, stop, none = LEAST) {
    let found = none;
    for (let a = start + this.size, b = stop + this.size; a < b; a >>= 1, b >>= 1) {
      if (a & 1) found = Math.max(found, this.high[a++]);
      if (b & 1) found = Math.max(found, this.high[--b]);
    }
    return found;
  }
}

// The number of true entries of any rectangle of a table of bools, from sums over the rectangles that begin at (0, 0).
class Areas {
  constructor(bools, rows, columns) {
    this.rows = rows;
    this.columns = columns;
    this.sums = new Float64Array((rows + 1) * (columns + 1));
    for (let i = 0; i < rows; i++) {
      let row = 0;
      for (let j = 0; j < columns; j++) {
        row += bools[i * columns + j];
        this.sums[(i + 1) * (columns + 1) + j + 1] = this.sums[i * (columns + 1) + j + 1] + row;
      }
    }
  }

  count(top, bottom, left, right) {
    const width = this.columns + 1;
    const { sums } = this;
    return sums[bottom * width + right] - sums[top * width + right] - sums[bottom * width + left] + sums[top * width + left];
  }
}

// The first index of a sorted array whose entry is at least (or, for "right", greater than) a value.
function bisect(sorted, value, side = "left") {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value || (side === "right" && sorted[middle] === value)) low = middle + 1;
    else high = middle;
  }
  return low;
}
