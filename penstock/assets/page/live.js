// The machine beside the chat: memory, lanes, speed promised and measured. Asked once in two seconds, and not while the page is hidden.

import { get } from "./server.js";

const EVERY_MS = 2000;
const bytes = (n) => (n >= 2 ** 30 ? `${(n / 2 ** 30).toFixed(2)} GiB` : `${(n / 2 ** 20).toFixed(1)} MiB`);
const rate = (n) => `${(n / 1e9).toFixed(2)} GB/s`;
const speed = (n) => (n >= 100 ? n.toFixed(0) : n >= 10 ? n.toFixed(1) : n.toFixed(2));

function rows(where, found) {
  const shown = found.map(([name, value, share]) => {
    const row = document.createElement("div"), line = document.createElement("div");
    line.className = "row";
    line.append(Object.assign(document.createElement("span"), { textContent: name }), Object.assign(document.createElement("span"), { textContent: value }));
    row.append(line);
    if (share !== undefined) {
      const bar = Object.assign(document.createElement("progress"), { max: 1, value: Math.min(1, share) });
      bar.setAttribute("aria-label", `${name}: ${value}`);
      row.append(bar);
    }
    return row;
  });
  document.getElementById(where).replaceChildren(...shown);
}

// Shows what the server tells of itself. `key()`: of the settings. `told(now)`: is called with it.
export function watch(key, told) {
  let before = null, waits = false;
  async function look() {
    if (document.hidden || waits) return;
    waits = true;
    try {
      const now = { ...await get("v1/live", key()), at_ms: performance.now() };
      show(now, before);
      before = now;
      told(now);
    } catch (error) {
      document.getElementById("speed").replaceChildren(Object.assign(document.createElement("dt"), { textContent: error.message, className: "wrong" }));
    } finally {
      waits = false;
    }
  }
  setInterval(look, EVERY_MS);
  document.addEventListener("visibilitychange", look);
  look();
}

function show(now, before) {
  const same = before && before.model === now.model && now.output_tokens >= before.output_tokens;
  const passes = same ? now.passes_s - before.passes_s : 0, said = same ? now.output_tokens - before.output_tokens : 0;
  const moved = (lane) => (passes > 0 ? (now.moved_bytes[lane] - (before.moved_bytes[lane] ?? 0)) / passes : 0);
  const lines = [
    ["tokens/s", passes > 0 && said > 0 ? speed(said / passes) : "–"],
    [`promised, ${now.sequences} at once`, speed(now.predicted_tokens_per_s)],
    ["answering", String(now.running)],
    ["waiting", String(now.waiting)],
    ["tokens said", String(now.output_tokens)],
  ];
  const parts = lines.flatMap(([name, value]) => [
    Object.assign(document.createElement("dt"), { textContent: name }), Object.assign(document.createElement("dd"), { textContent: value }),
  ]);
  document.getElementById("speed").replaceChildren(...parts);
  rows("tiers", [
    ...now.tiers.map((tier) => {
      const most = tier.limit_bytes ?? tier.bytes;
      return tier.had_bytes === null ? [tier.name, bytes(tier.bytes)] : [tier.name, `${bytes(tier.had_bytes)} of ${bytes(most)}`, tier.had_bytes / most];
    }),
    ["KV pages in use", `${now.kv_pages_had} of ${now.kv_pages}`, now.kv_pages ? now.kv_pages_had / now.kv_pages : 0],
  ]);
  const busy = same ? Math.min(1, (1000 * passes) / (now.at_ms - before.at_ms)) : undefined;
  rows("lanes", [
    ["computing", busy === undefined ? "–" : `${(100 * busy).toFixed(0)} % of the time`, busy],
    ...Object.keys(now.moved_bytes).map((lane) => [lane, rate(moved(lane))]),
  ]);
}
