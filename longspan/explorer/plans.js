// The plans that Python precomputed: the cache after each step, and the devices that share the sequence. They hold for the
// numbers that the document was made with; with others they are `stale`.

// {t, step, ...}: the keys that a cache holds after step t. With sampled steps, `step` is the last one up to t.
function cacheAt(plan, t, stale) {
  if (plan.error) return { t, stale, error: plan.error };
  checkInt("t", t, 0, plan.length - 1);
  const step = plan.runs ? t : plan.steps[bisect(plan.steps, t, "right") - 1];
  const kept = plan.runs ? keptByRuns(plan.runs, t) : pairsOf(plan.kept[bisect(plan.steps, t, "right") - 1]);
  const evicted = gaps(kept, step + 1);
  const pinned = plan.pinned.filter((key) => key <= step);
  const count = lengthOf(kept);
  return {
    t,
    step,
    stale,
    sampled: plan.runs === null,
    kept,
    evicted,
    pinned,
    kept_count: count,
    evicted_count: step + 1 - count,
    slots: plan.capacity,
    used_bytes: count * plan.slot_bytes,
    bytes: plan.capacity * plan.slot_bytes,
    full_bytes: plan.full_bytes,
    text: plan.text,
  };
}

// Spans of the keys up to step t that are overwritten after it.
function keptByRuns(runs, t) {
  const spans = [];
  for (const [start, stop, evicted, moves] of runs) {
    if (start > t) break;
    const first = moves ? Math.max(start, t - evicted + 1) : evicted > t ? start : stop;
    const end = Math.min(stop, t + 1);
    if (first >= end || (moves && evicted <= 0)) continue;
    const last = spans[spans.length - 1];
    if (last && last[1] === first) last[1] = end;
    else spans.push([first, end]);
  }
  return spans;
}

function pairsOf(flat) {
  const spans = [];
  for (let i = 0; i < flat.length; i += 2) spans.push([flat[i], flat[i + 1]]);
  return spans;
}

// The spans of [0, stop) between spans.
function gaps(spans, stop) {
  const found = [];
  let at = 0;
  for (const [start, end] of [...spans, [stop, stop]]) {
    if (at < start) found.push([at, start]);
    at = end;
  }
  return found;
}

// The spans of consecutive keys in a sorted list.
function spansOfKeys(keys) {
  const spans = [];
  for (const key of keys) {
    const last = spans[spans.length - 1];
    if (last && last[1] === key) last[1] = key + 1;
    else spans.push([key, key + 1]);
  }
  return spans;
}

const lengthOf = (spans) => spans.reduce((sum, [start, stop]) => sum + stop - start, 0);

function devicesOf(plans, count, order, stale) {
  if (plans.error) return { count, order, stale, error: plans.error };
  const byOrder = Object.hasOwn(plans, String(count)) ? plans[count] : null;
  if (!byOrder) throw new RangeError(`There are plans for ${Object.keys(plans).join(", ")} devices, not for ${count}.`);
  if (!Object.hasOwn(byOrder, order)) throw new RangeError(`The order must be ${Object.keys(byOrder).join(" or ")}, got ${order}.`);
  return { count: Number(count), order, stale, ...byOrder[order] };
}
