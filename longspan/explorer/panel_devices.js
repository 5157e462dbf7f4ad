// The devices panel: who holds, computes and receives what if devices share the sequence.

class DevicesPanel {
  constructor(app) {
    this.app = app;
    this.device = null; // the device that the picture shows
    byId("device-count").replaceChildren(...choices("device-count", DEVICE_COUNTS, (n) => app.change({ devices: n })));
    byId("device-order").replaceChildren(...choices("device-order", ORDERS, (order) => app.change({ order })));
  }

  show({ devices, order }) {
    const { page, explorer } = this.app;
    check("device-count", devices);
    check("device-order", order);
    const plan = explorer.devices(devices, order);
    const isStale = !plan.error && !explorer.isInitial;
    showNote("devices-note", plan.error ?? (isStale ? STALE : ""));
    byId("panel-devices").classList.toggle("stale", isStale);
    byId("devices-found").hidden = Boolean(plan.error);
    if (plan.error || this.device >= devices) this.device = null;
    if (plan.error) return plan;
    fillTable(byId("devices-facts"), planFacts(plan));
    byId("devices-list").replaceChildren(...plan.devices.map((device) => this.item(device, page.kv_len, plan)));
    byId("devices-text").replaceChildren(...plan.text.map((line) => element("p", {}, line)));
    return plan;
  }

  item(device, length, plan) {
    const isShown = device.device === this.device;
    const button = element(
      "button",
      { type: "button", class: "device", "aria-pressed": String(isShown) },
      element("b", {}, `Device ${device.device}`),
      element("span", { class: "strip", "aria-hidden": "true" }, ...deviceStrip(device, length)),
      element("span", {}, `holds ${spansText(device.holds)}`),
      device.pairs === null ? null : element("span", {}, computesText(device)),
      element("span", {}, receivesText(device, plan))
    );
    button.addEventListener("click", () => {
      this.device = isShown ? null : device.device;
      this.app.refresh();
      byId("devices-list").children[device.device]?.focus();
    });
    return button;
  }
}

function planFacts(plan) {
  return [
    ["rows per device", grouped(plan.rows)],
    ["received, forward", counted(plan.sent_rows, "row")],
    ["received, backward", counted(plan.sent_rows_backward, "row")],
    ["the mask requires", counted(plan.bound_rows, "row")],
    ["an all-gather sends", counted(plan.gather_rows, "row")],
    ["load, max/mean", plan.load === null ? "depends on the mask's arrays" : plan.load.toFixed(3)],
  ];
}

function computesText({ pairs, load }) {
  return `computes ${counted(pairs, "pair")}, ${load.toFixed(2)} of the mean`;
}

function receivesText(device, plan) {
  const texts = device.receives.map(([kind, start, stop, sources, steps]) => {
    const from = sources.length === 1 ? `device ${sources[0]}` : `devices ${sources.join(", ")}`;
    const kinds = kind === "queries" ? "queries " : "";
    return `${kinds}${spansText([[start, stop]])} from ${from} by ${stepNames(plan, steps)}`;
  });
  const listed = lengthOf(device.receives.map(([, start, stop]) => [start, stop]));
  if (listed < device.received) texts.push(`and ${counted(device.received - listed, "more row")}`);
  for (const [step, rows] of device.others) {
    texts.push(`${counted(rows, "row")} whose tokens are known at run time, by ${stepNames(plan, [step])}`);
  }
  return texts.length ? `receives ${texts.join("; ")}` : "receives nothing";
}

// "shift +1, all-reduce": the operations of some steps, each once.
function stepNames(plan, steps) {
  const names = steps.map((step) => plan.steps[step]?.text.split(":")[0] ?? `step ${step}`);
  return [...new Set(names)].join(", ");
}

function deviceStrip(device, length) {
  const piece = (kind, start, stop) => {
    const width = Math.max((100 * (stop - start)) / length, 0.6);
    return element("i", { class: kind, style: `left: ${(100 * start) / length}%; width: ${width}%` });
  };
  return [
    ...device.holds.map(([start, stop]) => piece("held", start, stop)),
    ...device.receives.map(([kind, start, stop]) => piece(kind === "queries" ? "queries" : "received", start, stop)),
  ];
}

// Radio buttons that look like one control.
function choices(name, values, onChoose) {
  return values.map((value) => {
    const input = element("input", { type: "radio", name, value, id: `${name}-${value}` });
    input.addEventListener("change", () => onChoose(value));
    return element("label", {}, input, element("span", {}, String(value)));
  });
}

function check(name, value) {
  byId(`${name}-${value}`).checked = true;
}
