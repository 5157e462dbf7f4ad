// Long computations: counts and comparisons of many pairs run in a worker, so that the page stays smooth. The worker has
// the evaluator and the document.

const QUICK_TILES = 2 ** 18; // tiles, and pairs, up to these numbers are counted at once
const QUICK_PAIRS = 2 ** 24;
const QUICK_PAIRS_OF_CELLS = 2 ** 20; // the same if Python evaluated a rule, so that pairs are read one by one

const WORKER = `
let explorer = null;
onmessage = ({ data }) => {
  if (data.page) explorer = makeExplorer(data.page);
  else {
    explorer.setNumbers(data.numbers);
    postMessage({ key: data.key, found: explorer[data.method](...data.given) });
  }
};
`;

class Background {
  // `onAnswer()` is called when an answer has arrived.
  constructor(page, explorer, hasCells, onAnswer) {
    this.page = page;
    this.quickPairs = hasCells ? QUICK_PAIRS_OF_CELLS : QUICK_PAIRS;
    this.explorer = explorer;
    this.onAnswer = onAnswer;
    this.known = new Map();
    this.wanted = new Map(); // questions asked since `begin`
    this.running = null; // the key of the question that the worker answers
    this.worker = null;
    this.hasWorkers = true;
  }

  begin() {
    this.wanted.clear();
  }

  // What a method of the explorer returns, for its present numbers; undefined if it is computed in the background.
  answer(method, ...given) {
    const { numbers } = this.explorer;
    const key = `${numbers} ${method} ${given}`;
    if (!this.known.has(key) && this.isQuick(method, given)) this.known.set(key, this.explorer[method](...given));
    if (!this.known.has(key)) this.wanted.set(key, { key, numbers, method, given });
    return this.known.get(key);
  }

  isQuick(method, [qTile, kvTile]) {
    const { q_len: queries, kv_len: keys } = this.page;
    if (method !== "tiles") return queries * keys <= this.quickPairs;
    return Math.ceil(queries / qTile) * Math.ceil(keys / kvTile) <= QUICK_TILES;
  }

  // Starts the next question that is wanted, and stops one that no longer is.
  proceed() {
    if (this.running && !this.wanted.has(this.running)) this.stop();
    const [next] = this.wanted.values();
    if (this.running || !next) return;
    this.running = next.key;
    this.worker ??= this.start();
    if (this.worker) this.worker.postMessage(next);
    else this.computeHere(next);
  }

  // Where the browser allows no worker, the page itself computes, after it has drawn.
  computeHere({ key, method, given }) {
    setTimeout(() => this.arrived(key, this.explorer[method](...given)), 20);
  }

  start() {
    if (!this.hasWorkers) return null;
    const source = byId("evaluator").textContent + WORKER;
    const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    try {
      const worker = new Worker(url);
      worker.onmessage = ({ data }) => this.arrived(data.key, data.found);
      worker.onerror = () => this.failed();
      worker.postMessage({ page: this.page });
      return worker;
    } catch {
      this.hasWorkers = false;
      return null;
    } finally {
      URL.revokeObjectURL(url);
    }
  }

  failed() {
    this.hasWorkers = false;
    this.stop();
    this.onAnswer(); // asks again
  }

  stop() {
    this.worker?.terminate();
    this.worker = this.running = null;
  }

  arrived(key, found) {
    if (key !== this.running) return;
    this.running = null;
    this.known.set(key, found);
    this.wanted.delete(key);
    this.onAnswer();
  }
}
