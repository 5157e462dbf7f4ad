// The map: the canvas with the picture of the mask, its axes and overlays. It draws when something changes, and uses the
// rest of each frame to draw pictures in more detail.

const BUSY_BUDGET = 5; // milliseconds of a frame for new pictures while the view moves
const IDLE_BUDGET = 11; // the same while it rests
const LEAST_HEIGHT = 200; // pixels of the canvas
const GRID_CELL = 9; // pixels along a cell from which cells have lines between them
const EASE = 0.3; // the part of a zoom's remaining way that one frame goes
const INKS = [
  "paper", "text", "muted", "line", "guide", "partial-wash", "held-wash", "received-wash", "kept", "evicted", "pinned",
];

class MaskMap {
  // `overlay(context, view, origin, ink)` draws over the picture; `onSettled()` is called when all of it is drawn.
  constructor(page, explorer, { overlay, onSettled }) {
    this.page = page;
    this.explorer = explorer;
    this.overlay = overlay;
    this.onSettled = onSettled;
    this.canvas = byId("mask-canvas");
    this.context = this.canvas.getContext("2d");
    this.view = new View(page.q_len, page.kv_len);
    this.axes = new Axes(page);
    this.mode = "mask";
    this.target = null; // the zoom that the view approaches
    this.cell = null; // the selected cell
    this.hover = null;
    this.hasEdges = true; // whether lines between documents are drawn
    this.isScheduled = false;
    this.isMoved = true;
    this.lastMove = 0;
    this.isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.retheme());
    this.retheme();
    new ResizeObserver(() => this.resize()).observe(this.canvas);
    this.resize();
  }

  get origin() {
    return [this.axes.left, this.axes.top];
  }

  resize() {
    const { axes, view, canvas } = this;
    const { width } = canvas.getBoundingClientRect();
    const shape = View.isStretched(view.queries, view.keys) ? Infinity : view.queries / view.keys;
    const natural = axes.top + 2 + (width - axes.left - axes.right) * shape;
    const height = Math.max(Math.min(natural, parseFloat(getComputedStyle(canvas).maxHeight)), LEAST_HEIGHT);
    canvas.style.height = `${height}px`;
    this.density = Math.min(devicePixelRatio || 1, 3);
    const [wide, high] = [Math.round(width * this.density), Math.round(height * this.density)];
    if (wide === canvas.width && high === canvas.height) return;
    [canvas.width, canvas.height] = [wide, high]; // this clears the canvas
    view.resize(width - axes.left - axes.right, height - axes.top - 2);
    this.raster.want(view, this.density);
    this.draw();
    this.moved();
  }

  retheme() {
    const style = getComputedStyle(document.documentElement);
    this.ink = {};
    for (const name of INKS) {
      const key = name.replace(/-(\w)/g, (_, letter) => letter.toUpperCase());
      this.ink[key] = style.getPropertyValue(`--${name}`).trim();
    }
    this.palette = readPalette();
    this.reset();
  }

  // Draws all pictures again: the mask or the colours changed.
  reset() {
    const shader =
      this.mode === "difference"
        ? new DifferenceShader(this.explorer, this.palette)
        : new MaskShader(this.explorer, this.palette);
    this.raster = new Raster(this.page.q_len, this.page.kv_len, shader, this.raster ?? null);
    this.moved();
  }

  setMode(mode) {
    if (mode === this.mode) return;
    this.mode = mode;
    this.reset();
  }

  moved() {
    this.isMoved = true;
    this.lastMove = performance.now();
    this.redraw();
  }

  redraw() {
    document.documentElement.dataset.ready = "false";
    if (this.isScheduled) return;
    this.isScheduled = true;
    requestAnimationFrame((now) => this.frame(now));
  }

  frame() {
    this.isScheduled = false;
    this.approach();
    const start = performance.now();
    if (this.isMoved) this.raster.want(this.view, this.density);
    this.isMoved = false;
    const isBusy = this.target !== null || start - this.lastMove < 120;
    const isDone = this.raster.work(start + (isBusy ? BUSY_BUDGET : IDLE_BUDGET));
    this.draw();
    if (this.target !== null || !isDone) this.redraw();
    else this.onSettled();
  }

  draw() {
    const { context, view, axes, ink, density, origin } = this;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.save();
    this.clip();
    this.raster.paint(context, view, density, origin);
    context.setTransform(density, 0, 0, density, 0, 0);
    this.drawGrid();
    if (this.hasEdges) axes.drawEdges(context, view, ink);
    this.overlay(context, view, origin, ink);
    for (const cell of [this.cell, this.hover]) {
      if (cell) drawCell(context, view, cell, origin, ink, cell === this.cell);
    }
    context.restore();
    context.setTransform(density, 0, 0, density, 0, 0);
    axes.draw(context, view, ink);
    context.strokeStyle = ink.line;
    context.lineWidth = 1;
    context.strokeRect(origin[0] - 0.5, origin[1] - 0.5, this.shownWidth + 1, this.shownHeight + 1);
  }

  get shownWidth() {
    return this.page.kv_len ? Math.min(this.view.xOf(this.view.keys), this.view.width) : 0;
  }

  get shownHeight() {
    return this.page.q_len ? Math.min(this.view.yOf(this.view.queries), this.view.height) : 0;
  }

  clip() {
    const { context, density, origin } = this;
    context.beginPath();
    const place = [...origin, this.shownWidth, this.shownHeight].map((length) => Math.round(length * density));
    context.rect(...place);
    context.clip();
  }

  drawGrid() {
    const { context, view, ink } = this;
    if (Math.min(view.scaleX, view.scaleY) < GRID_CELL) return;
    context.strokeStyle = ink.guide;
    context.lineWidth = 1;
    context.beginPath();
    gridLines(context, view, this.origin, 1, 1);
    context.stroke();
  }

  // Zooms by a factor, at a place of the plot; smoothly, unless motion is to be reduced.
  zoomBy(factor, x = this.view.width / 2, y = this.view.height / 2) {
    const zoom = clamp((this.target?.zoom ?? this.view.zoom) * factor, 1, this.view.maxZoom);
    this.target = { zoom, x, y };
    this.moved();
  }

  zoomTo(zoom) {
    this.target = null;
    this.view.zoomTo(zoom, this.view.width / 2, this.view.height / 2);
    this.moved();
  }

  approach() {
    if (this.target === null) return;
    const { zoom, x, y } = this.target;
    const left = Math.log(zoom / this.view.zoom);
    const isLast = this.isCalm || Math.abs(left) < 0.01;
    this.view.zoomTo(isLast ? zoom : this.view.zoom * Math.exp(left * EASE), x, y);
    if (isLast) this.target = null;
    this.isMoved = true;
    this.lastMove = performance.now();
  }

  pan(dx, dy) {
    this.target = null;
    this.view.pan(dx, dy);
    this.moved();
  }

  // Selects a cell, and moves the view if it does not show the cell.
  select(cell, mustShow) {
    this.cell = cell;
    if (cell && mustShow && !this.view.shows(cell.q, cell.k)) {
      this.view.centre(cell.q, cell.k);
      this.moved();
    }
    this.redraw();
  }

  // The middle of a cell in the window.
  placeOf(q, k) {
    const box = this.canvas.getBoundingClientRect();
    return [box.left + this.axes.left + this.view.xOf(k + 0.5), box.top + this.axes.top + this.view.yOf(q + 0.5)];
  }

  pairAt(x, y) {
    return this.page.q_len && this.page.kv_len ? this.view.pairAt(x - this.axes.left, y - this.axes.top) : null;
  }
}
