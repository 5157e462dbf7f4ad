// Shades: the colour of a rectangle of pairs, as a pixel of a canvas. A shader has three methods:
// `uniform(q0, q1, k0, k1)` is the colour if all pairs have the same one, else null; `mixed(...)` is a colour for a
// rectangle of which some pairs may be allowed: it shows their share, which is estimated if there are many pairs;
// `texture(...)` is the one colour of a large rectangle that is a fine regular pattern, such as a strided mask, else null.

const SHARES = 64; // steps from none to all
const EXACT_SIDE = 8; // rectangles of at most this many slots along each side are read pair by pair
const LONG = 4; // slots along the sides of a sampled rectangle
const SHORT = 2;
const ALIKE = 1 / 16; // the greatest difference of shares in a regular pattern
const RARE = 1 / 8; // the least share, allowed or not, that a sample estimates well enough
// A share begins at this opacity, so that a single allowed pair of many is visible.
const LEAST_OPACITY = 0.24;
const MOST_OPACITY = 0.8;
const UNKNOWN_OPACITY = 0.55;

// The palette of the page's theme: {full, unknown, both, first, second} as [red, green, blue].
function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const palette = {};
  for (const name of ["full", "unknown", "both", "first", "second"]) {
    const text = style.getPropertyValue(`--${name}`).trim();
    palette[name] = [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  }
  return palette;
}

// A pixel in the byte order of ImageData on little-endian machines.
const pixelOf = ([red, green, blue], opacity) =>
  ((Math.round(opacity * 255) << 24) | (blue << 16) | (green << 8) | red) >>> 0;

const opacityOf = (share) => LEAST_OPACITY + (MOST_OPACITY - LEAST_OPACITY) * share;

class MaskShader {
  constructor(explorer, palette) {
    this.explorer = explorer;
    this.full = pixelOf(palette.full, 1);
    this.shades = Array.from({ length: SHARES + 1 }, (_, i) => pixelOf(palette.full, opacityOf(i / SHARES)));
    this.unknown = pixelOf(palette.unknown, UNKNOWN_OPACITY);
    this.read = this.allowed = this.doubtful = this.uniformQuarters = 0;
  }

  uniform(q0, q1, k0, k1) {
    const kind = this.explorer.classify(q0, q1, k0, k1);
    if (kind === 0) return 0;
    return kind === FULL ? this.full : null;
  }

  mixed(q0, q1, k0, k1) {
    this.read = this.allowed = this.doubtful = 0;
    overSamples(q0, q1, k0, k1, this);
    if (this.doubtful) return this.unknown;
    if (this.read === 1) return this.allowed ? this.full : 0;
    return this.shades[Math.round((SHARES * this.allowed) / this.read)];
  }

  texture(q0, q1, k0, k1) {
    const [q, k] = [(q0 + q1) >> 1, (k0 + k1) >> 1];
    let [least, most] = [1, 0];
    for (const part of [[q0, q, k0, k], [q0, q, k, k1], [q, q1, k0, k], [q, q1, k, k1]]) {
      this.uniformQuarters = 0;
      this.mixed(...part);
      if (this.uniformQuarters || this.doubtful) return null;
      least = Math.min(least, this.allowed / this.read);
      most = Math.max(most, this.allowed / this.read);
    }
    if (most - least > ALIKE || least < RARE || most > 1 - RARE) return null;
    return this.shades[Math.round((SHARES * (least + most)) / 2)];
  }

  // One quarter of a sampled rectangle counts as `area` pairs if it is uniform.
  quarter(q0, q1, k0, k1, area) {
    const kind = this.explorer.classify(q0, q1, k0, k1);
    if (kind === ANY) return false;
    this.uniformQuarters += 1;
    this.read += area;
    if (kind === FULL) this.allowed += area;
    return true;
  }

  pair(q, k) {
    const truth = this.explorer.allowed(q, k);
    this.read += 1;
    if (truth) this.allowed += 1;
    else if (truth === null) this.doubtful += 1;
  }
}

// Three colours: allowed by both masks, by the first only, by the second only.
class DifferenceShader {
  constructor(explorer, palette) {
    this.explorer = explorer;
    this.colours = [palette.both, palette.first, palette.second];
    this.whole = this.colours.map((colour) => pixelOf(colour, 1));
    this.unknown = pixelOf(palette.unknown, UNKNOWN_OPACITY);
    this.read = this.doubtful = 0;
    this.counts = [0, 0, 0];
  }

  uniform(q0, q1, k0, k1) {
    const { both, first, second } = this.explorer.classifyDifference(q0, q1, k0, k1);
    if (both === FULL) return this.whole[0];
    if (first === FULL) return this.whole[1];
    if (second === FULL) return this.whole[2];
    return both | first | second ? null : 0;
  }

  mixed(q0, q1, k0, k1) {
    this.read = this.doubtful = 0;
    this.counts.fill(0);
    overSamples(q0, q1, k0, k1, this);
    const total = this.counts[0] + this.counts[1] + this.counts[2];
    if (this.doubtful) return this.unknown;
    if (this.read === 1) return total ? this.whole[this.counts.indexOf(1)] : 0;
    // Where some pairs differ, the difference is not hidden by the pairs that do not.
    const differing = this.counts[1] + this.counts[2];
    const weights = differing ? [this.counts[0] / 4, this.counts[1], this.counts[2]] : this.counts;
    return pixelOf(blend(this.colours, total ? weights : [1, 0, 0]), opacityOf(total / this.read));
  }

  texture() {
    return null;
  }

  quarter(q0, q1, k0, k1, area) {
    const found = this.uniform(q0, q1, k0, k1);
    if (found === null) return false;
    this.read += area;
    const which = this.whole.indexOf(found);
    if (which >= 0) this.counts[which] += area;
    return true;
  }

  pair(q, k) {
    const [a, b] = [this.explorer.allowed(q, k), this.explorer.allowedByOther(q, k)];
    this.read += 1;
    if (a === null || b === null) this.doubtful += 1;
    else if (a && b) this.counts[0] += 1;
    else if (a) this.counts[1] += 1;
    else if (b) this.counts[2] += 1;
  }
}

function blend(colours, weights) {
  const total = weights.reduce((a, b) => a + b, 0);
  return [0, 1, 2].map((i) => Math.round(colours.reduce((sum, colour, c) => sum + colour[i] * weights[c], 0) / total));
}

// Calls `shader.pair` for the pairs of a rectangle; of a large one, for a sample of each quarter that is not uniform. The
// pairs of a sample are neighbours, so that a strided mask has nearly its true share in each.
function overSamples(q0, q1, k0, k1, shader) {
  if (q1 - q0 <= EXACT_SIDE && k1 - k0 <= EXACT_SIDE) {
    overPairs(q0, q1, k0, k1, shader);
    return;
  }
  const middles = [(q0 + q1) >> 1, (k0 + k1) >> 1];
  const rows = [[q0, middles[0]], [middles[0], q1]];
  const columns = [[k0, middles[1]], [middles[1], k1]];
  for (const [row, [top, bottom]] of rows.entries()) {
    for (const [column, [left, right]] of columns.entries()) {
      if (top === bottom || left === right) continue;
      const height = Math.min(row === column ? SHORT : LONG, bottom - top);
      const width = Math.min(row === column ? LONG : SHORT, right - left);
      if (shader.quarter(top, bottom, left, right, height * width)) continue;
      const q = top + Math.floor(scattered(top, left) * (bottom - top - height + 1));
      const k = left + Math.floor(scattered(left, bottom) * (right - left - width + 1));
      overPairs(q, q + height, k, k + width, shader);
    }
  }
}

function overPairs(q0, q1, k0, k1, shader) {
  for (let q = q0; q < q1; q++) {
    for (let k = k0; k < k1; k++) shader.pair(q, k);
  }
}

// A number in [0, 1) that depends on a place only, so that a picture is the same each time.
function scattered(a, b) {
  let x = Math.imul(a + 0x9e3779b9, 0x85ebca6b) ^ Math.imul(b + 0x7f4a7c15, 0xc2b2ae35);
  x = Math.imul(x ^ (x >>> 15), 0x2c1b3c6d);
  return ((x ^ (x >>> 13)) >>> 0) / 2 ** 32;
}
