// Gestures: mouse, touch and keyboard on the canvas.

const CLICK = 4; // pixels that a pointer may move between press and release of a click
const KEY_ZOOM = 2; // the factor of one press of + or -

// `on` has select(cell or null), hover(cell or null), move(dq, dk) and announce().
function listenToGestures(map, on) {
  const { canvas } = map;
  const pointers = new Map();
  let travelled = 0;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const inPlot = ([x, y]) => [x - map.axes.left, y - map.axes.top];

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    canvas.setPointerCapture(event.pointerId);
    if (!pointers.size) travelled = 0;
    pointers.set(event.pointerId, place(event));
  });

  canvas.addEventListener("pointermove", (event) => {
    const to = place(event);
    const from = pointers.get(event.pointerId);
    if (!from) {
      if (event.pointerType !== "touch") on.hover(map.pairAt(...to));
      return;
    }
    travelled += Math.hypot(to[0] - from[0], to[1] - from[1]);
    if (pointers.size === 2) pinch(map, pointers, event.pointerId, to, inPlot);
    else if (travelled > CLICK) {
      canvas.dataset.dragging = "true";
      on.hover(null);
      map.pan(to[0] - from[0], to[1] - from[1]);
    }
    pointers.set(event.pointerId, to);
  });

  const release = (event) => {
    const from = pointers.get(event.pointerId);
    pointers.delete(event.pointerId);
    delete canvas.dataset.dragging;
    if (from && event.type === "pointerup" && travelled <= CLICK && !pointers.size) on.select(map.pairAt(...from));
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => on.hover(null));

  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const unit = [1, 24, 240][event.deltaMode];
      const speed = event.ctrlKey ? 0.012 : 0.003; // browsers report a pinch on a touchpad as a wheel with Ctrl
      map.zoomBy(Math.exp(-clamp(event.deltaY * unit, -240, 240) * speed), ...inPlot(place(event)));
    },
    { passive: false }
  );
  canvas.addEventListener("dblclick", (event) => map.zoomBy(4, ...inPlot(place(event))));
  canvas.addEventListener("keydown", (event) => pressed(event, map, on));
}

// Two fingers: the middle between them moves the picture, their distance zooms it.
function pinch(map, pointers, moving, to, inPlot) {
  const [other] = [...pointers].filter(([id]) => id !== moving).map(([, at]) => at);
  const from = pointers.get(moving);
  const span = (a) => Math.max(Math.hypot(a[0] - other[0], a[1] - other[1]), 1);
  const middle = (a) => inPlot([(a[0] + other[0]) / 2, (a[1] + other[1]) / 2]);
  map.target = null;
  map.view.zoomTo((map.view.zoom * span(to)) / span(from), ...middle(from), ...middle(to));
  map.moved();
}

const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

function pressed(event, map, on) {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const step = event.shiftKey ? 10 : 1;
  if (ARROWS[event.key]) on.move(...ARROWS[event.key].map((n) => n * step));
  else if (event.key === "+" || event.key === "=") zoomAtCell(map, KEY_ZOOM);
  else if (event.key === "-" || event.key === "_") zoomAtCell(map, 1 / KEY_ZOOM);
  else if (event.key === "0") map.zoomTo(1);
  else return;
  event.preventDefault();
}

// Zooms at the selected cell if it is visible, else in the middle.
function zoomAtCell(map, factor) {
  const { cell, view } = map;
  const [x, y] = cell ? [view.xOf(cell.k + 0.5), view.yOf(cell.q + 0.5)] : [-1, -1];
  const isVisible = x >= 0 && y >= 0 && x <= view.width && y <= view.height;
  map.zoomBy(factor, ...(isVisible ? [x, y] : []));
}
