// The part of the mask that the canvas shows, and the place of each pair in it. Lengths are in CSS pixels.

const MAX_CELL = 64; // pixels along a cell that is zoomed in as far as possible
const MAX_STRETCH = 6; // masks with more keys than this times their queries, or fewer, fill the canvas

class View {
  constructor(queries, keys) {
    this.queries = Math.max(queries, 1);
    this.keys = Math.max(keys, 1);
    this.zoom = 1;
    this.left = 0; // the key at the left edge
    this.top = 0; // the query at the top edge
    this.width = this.height = 1;
  }

  static isStretched(queries, keys) {
    return Math.max(queries, keys) > MAX_STRETCH * Math.min(queries, keys);
  }

  resize(width, height) {
    [this.width, this.height] = [Math.max(width, 1), Math.max(height, 1)];
    this.settle();
  }

  // Pixels per key and per query if the whole mask is shown.
  get fit() {
    const [x, y] = [this.width / this.keys, this.height / this.queries];
    if (View.isStretched(this.queries, this.keys)) return [x, y];
    return [Math.min(x, y), Math.min(x, y)];
  }

  scaleAt(zoom) {
    return this.fit.map((fit) => Math.min(fit * zoom, Math.max(MAX_CELL, fit)));
  }

  get scaleX() {
    return this.scaleAt(this.zoom)[0];
  }

  get scaleY() {
    return this.scaleAt(this.zoom)[1];
  }

  get maxZoom() {
    return Math.max(1, MAX_CELL / Math.min(...this.fit));
  }

  xOf(key) {
    return (key - this.left) * this.scaleX;
  }

  yOf(query) {
    return (query - this.top) * this.scaleY;
  }

  keyAt(x) {
    return this.left + x / this.scaleX;
  }

  queryAt(y) {
    return this.top + y / this.scaleY;
  }

  // The pair at a place, or null outside of the mask.
  pairAt(x, y) {
    const [q, k] = [Math.floor(this.queryAt(y)), Math.floor(this.keyAt(x))];
    const isInside = x >= 0 && y >= 0 && x < this.width && y < this.height;
    return isInside && q >= 0 && k >= 0 && q < this.queries && k < this.keys ? { q, k } : null;
  }

  // Zooms so that the pair at (x, y) stays there, or moves to another place.
  zoomTo(zoom, x, y, toX = x, toY = y) {
    const [key, query] = [this.keyAt(x), this.queryAt(y)];
    this.zoom = clamp(zoom, 1, this.maxZoom);
    this.left = key - toX / this.scaleX;
    this.top = query - toY / this.scaleY;
    this.settle();
  }

  pan(dx, dy) {
    this.left -= dx / this.scaleX;
    this.top -= dy / this.scaleY;
    this.settle();
  }

  centre(q, k) {
    this.left = k + 0.5 - this.width / this.scaleX / 2;
    this.top = q + 0.5 - this.height / this.scaleY / 2;
    this.settle();
  }

  shows(q, k) {
    const [x, y] = [this.xOf(k), this.yOf(q)];
    return x >= 0 && y >= 0 && x + this.scaleX <= this.width + 1 && y + this.scaleY <= this.height + 1;
  }

  // Keeps the mask in the canvas.
  settle() {
    this.zoom = clamp(this.zoom, 1, this.maxZoom);
    this.left = clamp(this.left, 0, Math.max(0, this.keys - this.width / this.scaleX));
    this.top = clamp(this.top, 0, Math.max(0, this.queries - this.height / this.scaleY));
  }

  // The visible slots [q0, q1) and [k0, k1).
  get visible() {
    return {
      q0: Math.floor(this.top),
      q1: Math.min(this.queries, Math.ceil(this.queryAt(this.height))),
      k0: Math.floor(this.left),
      k1: Math.min(this.keys, Math.ceil(this.keyAt(this.width))),
    };
  }
}
