/** Figures of the server: /metrics, differences between two readings. */

import { call } from "./api.js";
import { $, make, number } from "./dom.js";

const SAMPLES = 80; // points of a sparkline, two minutes of them

const FIGURES = [
  { name: "Running", value: (now) => now.get("num_requests_running") },
  { name: "Waiting", value: (now) => now.get("num_requests_waiting") },
  { name: "KV cache in use", unit: "%", max: 100, value: (now) => now.mean("kv_cache_usage_perc") * 100 },
  { name: "Prefix cache hits", unit: "%", max: 100, held: true, value: (now, last) => ratio(now, last, "prefix_cache_hits_total", "prefix_cache_queries_total") * 100 },
  { name: "Prompt", unit: "tokens/s", value: (now, last) => rate(now, last, "prompt_tokens_total") },
  { name: "Generation", unit: "tokens/s", value: (now, last) => rate(now, last, "generation_tokens_total") },
  { name: "Time to first token", unit: "ms, mean", held: true, value: (now, last) => mean(now, last, "time_to_first_token_seconds") * 1000 },
  { name: "Between tokens", unit: "ms, mean", held: true, value: (now, last) => mean(now, last, "inter_token_latency_seconds") * 1000 },
];

/** One reading of /metrics: the samples of a name, summed over their labels. What is not there is NaN. */
export class Reading {
  constructor(text) {
    this.at = performance.now();
    this.samples = new Map();
    for (const [, name, value] of text.matchAll(/^rayllm:(\w+)(?:\{.*\})? (\S+)/gm)) {
      const sample = this.samples.get(name) ?? { sum: 0, count: 0 };
      sample.sum += Number(value);
      sample.count += 1;
      this.samples.set(name, sample);
    }
  }

  get(name) { return this.samples.get(name)?.sum ?? NaN; }
  mean(name) { return this.get(name) / this.samples.get(name)?.count; }
}

function grown(now, last, name) {
  const difference = now.get(name) - (last?.get(name) ?? NaN);
  return difference >= 0 ? difference : NaN; // a counter that went back: the server was restarted
}
export function rate(now, last, name) { return grown(now, last, name) / ((now.at - last?.at) / 1000); }
function ratio(now, last, part, whole) { return grown(now, last, part) / (grown(now, last, whole) || NaN); }
function mean(now, last, name) { return ratio(now, last, `${name}_sum`, `${name}_count`); }

/** The part of the page that shows them. */
export class Figures {
  constructor() {
    this.last = null;
    this.figures = FIGURES.map((figure) => {
      const node = $("figure-template").content.firstElementChild.cloneNode(true);
      node.querySelector("dt").textContent = figure.name;
      $("figures").append(node);
      return { ...figure, node, values: [] };
    });
  }

  /** Read and show them. Returns whether the engine has any. Throws as `call` does. */
  async read() {
    const now = new Reading(await (await call("metrics")).text());
    for (const figure of this.figures) draw(figure, figure.value(now, this.last));
    this.last = now;
    return now.samples.has("num_requests_running");
  }

  /** The next reading has none before it. */
  forget() { this.last = null; }
}

function draw(figure, value) {
  figure.values = [...figure.values, value].slice(-SAMPLES);
  const known = Number.isFinite(value), [shape] = figure.node.getElementsByTagName("dd");
  figure.node.classList.toggle("stale", !known);
  if (known) shape.replaceChildren(`${number(value)} `, make("small", "", figure.unit ?? ""));
  else if (!figure.held) shape.textContent = "–"; // a mean stays until there is a next one
  const points = figure.values.map((v, i) => [100 - (figure.values.length - 1 - i) * 100 / (SAMPLES - 1), v]).filter(([, v]) => Number.isFinite(v));
  const top = figure.max ?? Math.max(1e-9, ...points.map(([, v]) => v));
  const line = points.map(([x, v]) => `${x.toFixed(1)},${(28.5 - 26 * v / top).toFixed(1)}`);
  figure.node.querySelector("polyline").setAttribute("points", [...line, ...line.slice(-1)].join(" ")); // a lone point is a dot
  const ends = line.length > 1 ? [`${points[0][0].toFixed(1)},30`, ...line, `${points.at(-1)[0].toFixed(1)},30`] : [];
  figure.node.querySelector("polygon").setAttribute("points", ends.join(" "));
}
