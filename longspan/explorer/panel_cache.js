// The cache panel: the keys that a cache holds after a step of decoding.

class CachePanel {
  constructor(app) {
    this.app = app;
    const last = Math.max(stepsOf(app.page) - 1, 0);
    for (const id of ["cache-step", "cache-step-number"]) {
      byId(id).max = last;
      const event = id === "cache-step" ? "input" : "change";
      byId(id).addEventListener(event, () => this.change(byId(id).valueAsNumber, last));
    }
  }

  change(t, last) {
    if (Number.isInteger(t) && t >= 0 && t <= last) this.app.change({ t });
    else this.app.refresh();
  }

  show({ t }) {
    const { page, explorer } = this.app;
    const panel = byId("panel-cache");
    const { error } = page.cache;
    byId("cache-found").hidden = Boolean(error);
    showNote("cache-note", error ?? (explorer.isInitial ? "" : STALE));
    panel.classList.toggle("stale", !error && !explorer.isInitial);
    if (error) return { t, error };
    const found = explorer.cache(t);
    byId("cache-step").value = t;
    if (document.activeElement !== byId("cache-step-number")) byId("cache-step-number").value = t;
    const isOther = found.sampled && found.step !== t;
    showNote("cache-sampled", isOther ? `The page has samples of the steps; this is step ${grouped(found.step)}.` : "");
    byId("cache-strip").replaceChildren(...cacheStrip(found, page.cache.length));
    fillTable(byId("cache-facts"), cacheFacts(found, page));
    byId("cache-text").replaceChildren(...found.text.map((line) => element("p", {}, line)));
    return found;
  }
}

const STALE = "Python computed this for the original numbers of the expression. Reset the numbers to use it again.";

function showNote(id, text) {
  byId(id).textContent = text;
  byId(id).hidden = !text;
}

function cacheFacts(found, page) {
  const steps = found.step + 1;
  return [
    [kindName("kept", "kept keys"), `${grouped(found.kept_count)} of ${grouped(steps)}: ${spansText(found.kept)}`],
    [kindName("evicted", "evicted keys"), `${grouped(found.evicted_count)}: ${spansText(found.evicted)}`],
    [kindName("pinned", "pinned keys"), `${grouped(found.pinned.length)}: ${spansText(spansOfKeys(found.pinned))}`],
    ["slots", `${grouped(found.slots)} for ${counted(page.cache.length, "position")}`],
    ["bytes in use", short(found.used_bytes, "B", 1024)],
    ["allocated", short(found.bytes, "B", 1024)],
    ["cache of all keys", short(found.full_bytes, "B", 1024)],
  ];
}

// All positions as a strip, in percent of its width.
function cacheStrip(found, length) {
  const piece = (kind, start, stop) => {
    const width = Math.max((100 * (stop - start)) / length, 0.4);
    return element("i", { class: kind, style: `left: ${(100 * start) / length}%; width: ${width}%` });
  };
  return [
    ...found.evicted.map(([start, stop]) => piece("evicted", start, stop)),
    ...found.kept.map(([start, stop]) => piece("kept", start, stop)),
    ...found.pinned.map((key) => piece("pinned", key, key + 1)),
  ];
}
