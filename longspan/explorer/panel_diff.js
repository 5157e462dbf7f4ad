// The diff panel: where the mask and another one differ.

const JUMP_CELL = 14; // pixels along a cell, at least, after a jump to a difference

class DiffPanel {
  constructor(app) {
    this.app = app;
    this.after = null; // the pair from which the next difference is searched
    byId("next-difference").addEventListener("click", () => this.next());
  }

  show() {
    const { page, explorer, background } = this.app;
    const hasOther = page.other !== null;
    byId("diff-none").hidden = hasOther;
    byId("diff-found").hidden = !hasOther;
    if (!hasOther) return explorer.diff();
    byId("first-text").textContent = explorer.text;
    byId("second-text").textContent = page.other.text;
    const found = background.answer("diff", -1, -1);
    byId("diff-answer").textContent = found ? differenceText(found) : "Comparing \u2026";
    byId("next-difference").disabled = !found || found.pair === null;
    if (this.after) queueMicrotask(() => this.search());
    return found ?? { pending: true };
  }

  // Selects the first differing pair after the selected cell; after the last one, the first of all.
  next() {
    const { state } = this.app;
    this.after = state.q === null ? [-1, -1] : [state.q, state.k];
    this.search();
  }

  search() {
    const { background } = this.app;
    if (!this.after) return;
    const isFirst = this.after[0] < 0;
    const found = background.answer("diff", ...this.after);
    if (!found) {
      byId("diff-here").textContent = "Searching \u2026";
      background.proceed();
    } else if (found.pair === null && !isFirst) {
      this.after = [-1, -1];
      this.search();
    } else {
      this.after = null;
      if (found.pair) this.jump(found.pair, isFirst);
    }
  }

  jump({ q, k, allowed_by: by }, isFirst) {
    this.app.selectCell({ q, k }, { leastCell: JUMP_CELL });
    const which = isFirst ? "First difference" : "Next difference";
    byId("diff-here").textContent = `${which}: query ${grouped(q)}, key ${grouped(k)}, allowed by the ${by} mask only.`;
  }
}

function comparedText({ q, k }, first, second) {
  const pair = `Query ${grouped(q)}, key ${grouped(k)}`;
  if (first === null || second === null) return `${pair}: the page does not know this pair.`;
  if (first && second) return `${pair}: both masks allow it.`;
  if (!first && !second) return `${pair}: no mask allows it.`;
  return `${pair}: only the ${first ? "first" : "second"} mask allows it.`;
}

function differenceText({ same, pair, complete }) {
  if (pair) {
    const { q, k, allowed_by: by } = pair;
    const place = `query ${grouped(q)}, key ${grouped(k)}: only the ${by} mask allows it.`;
    if (complete) return `The masks differ. The first differing pair is ${place}`;
    return `The masks differ, for example in ${place} The page cannot compare every pair before it.`;
  }
  if (same) return "The masks are the same: they allow the same pairs.";
  return complete ? "No other pair differs." : "No difference was found, but the page cannot compare every pair.";
}
