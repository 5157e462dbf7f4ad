// Overlays: what panels draw over the picture of the mask.

const LEAST_TILE = 6; // pixels along a tile from which the tiles are drawn

// The grid of tiles, with a wash over the PARTIAL ones.
function drawTiles(context, view, explorer, [qTile, kvTile], [left, top], ink) {
  const [width, height] = [kvTile * view.scaleX, qTile * view.scaleY];
  if (Math.min(width, height) < LEAST_TILE) return;
  const { q0, q1, k0, k1 } = view.visible;
  const rows = [Math.floor(q0 / qTile), Math.ceil(q1 / qTile)];
  const columns = [Math.floor(k0 / kvTile), Math.ceil(k1 / kvTile)];
  context.fillStyle = ink.partialWash;
  for (let row = rows[0]; row < rows[1]; row++) {
    for (let column = columns[0]; column < columns[1]; column++) {
      const q = row * qTile;
      const k = column * kvTile;
      const stops = [Math.min(q + qTile, view.queries), Math.min(k + kvTile, view.keys)];
      if (explorer.classify(q, stops[0], k, stops[1]) !== ANY) continue;
      context.fillRect(left + view.xOf(k), top + view.yOf(q), view.xOf(stops[1]) - view.xOf(k), view.yOf(stops[0]) - view.yOf(q));
    }
  }
  context.strokeStyle = ink.line;
  context.lineWidth = 1;
  context.beginPath();
  gridLines(context, view, [left, top], kvTile, qTile);
  context.stroke();
}

// Lines between cells of `wide` keys and `high` queries.
function gridLines(context, view, [left, top], wide, high) {
  const { q0, q1, k0, k1 } = view.visible;
  const bottom = top + Math.min(view.yOf(view.queries), view.height);
  const right = left + Math.min(view.xOf(view.keys), view.width);
  for (let k = Math.ceil(k0 / wide) * wide; k <= k1; k += wide) {
    const x = Math.round(left + view.xOf(k)) + 0.5;
    context.moveTo(x, top);
    context.lineTo(x, bottom);
  }
  for (let q = Math.ceil(q0 / high) * high; q <= q1; q += high) {
    const y = Math.round(top + view.yOf(q)) + 0.5;
    context.moveTo(left, y);
    context.lineTo(right, y);
  }
}

// The step of a cache: a line at its query, thick over the kept keys.
function drawStep(context, view, found, [left, top], ink) {
  if (found.error) return;
  const height = Math.max(3, Math.min(view.scaleY, 12));
  const y = top + view.yOf(found.step + 0.5) - height / 2;
  if (y < top - height || y > top + view.height) return;
  const bar = ([start, stop], colour) => {
    const [x0, x1] = [Math.max(view.xOf(start), 0), Math.min(view.xOf(stop), view.width)];
    if (x1 <= x0) return;
    context.fillStyle = colour;
    context.fillRect(left + x0, y, Math.max(x1 - x0, 1.5), height);
  };
  bar([0, found.step + 1], ink.evicted);
  for (const span of found.kept) bar(span, ink.kept);
  for (const key of found.pinned) bar([key, key + 1], ink.pinned);
}

// One device: the queries that it holds as rows, and the keys that it receives as columns.
function drawDevice(context, view, plan, device, [left, top], ink) {
  if (plan.error || device === null) return;
  const { holds, receives } = plan.devices[device];
  context.fillStyle = ink.heldWash;
  for (const [start, stop] of holds) {
    const [y0, y1] = [Math.max(view.yOf(start), 0), Math.min(view.yOf(stop), view.height)];
    if (y1 > y0) context.fillRect(left, top + y0, Math.min(view.xOf(view.keys), view.width), y1 - y0);
  }
  for (const [kind, start, stop] of receives) {
    if (kind === "queries") continue;
    for (const [q0, q1] of holds) {
      const [x0, x1] = [Math.max(view.xOf(start), 0), Math.min(view.xOf(stop), view.width)];
      const [y0, y1] = [Math.max(view.yOf(q0), 0), Math.min(view.yOf(q1), view.height)];
      context.fillStyle = ink.receivedWash;
      if (x1 > x0 && y1 > y0) context.fillRect(left + x0, top + y0, Math.max(x1 - x0, 1.5), y1 - y0);
    }
  }
}

// The selected cell, with lines along its query and its key.
function drawCell(context, view, { q, k }, [left, top], ink, isSelected) {
  const [x, y] = [left + view.xOf(k), top + view.yOf(q)];
  const [width, height] = [Math.max(view.scaleX, 1), Math.max(view.scaleY, 1)];
  context.fillStyle = ink.guide;
  context.fillRect(left, y, Math.min(view.xOf(view.keys), view.width), height);
  context.fillRect(x, top, width, Math.min(view.yOf(view.queries), view.height));
  const grown = Math.max(0, 7 - Math.min(width, height)) / 2;
  context.lineWidth = isSelected ? 3.5 : 2.5;
  context.strokeStyle = ink.paper;
  context.strokeRect(x - grown, y - grown, width + 2 * grown, height + 2 * grown);
  context.lineWidth = isSelected ? 2 : 1;
  context.strokeStyle = ink.text;
  context.strokeRect(x - grown, y - grown, width + 2 * grown, height + 2 * grown);
}
