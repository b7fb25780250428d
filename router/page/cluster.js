// The state of the cluster, asked for every second while somebody looks.

import { element, milliseconds } from "./elements.js";

const PERIOD_MS = 1000;
const POOL_WORDS = {
  PROMPT: "reads prompts and computes their KV cache",
  COMPLETION: "takes the KV cache over and writes answers",
};
const LATENCIES = [
  ["ttft", "First token", "answers"],
  ["itl", "Between tokens", "gaps"],
];

const byId = (id) => document.getElementById(id);

function show(cluster) {
  byId("model").textContent = cluster.model;
  const words = { draining: "shutting down", ready: "ready" }[cluster.state] ?? "waiting for workers";
  showState(cluster.state, words);
  byId("queued").textContent = cluster.queued;
  byId("running").textContent = cluster.running;
  byId("latency").replaceChildren(...LATENCIES.map(([key, title, of]) => latencyCard(title, of, cluster.latency[key])));
  byId("pools").replaceChildren(...cluster.pools.map(poolSection));
}

// Only a change is written: it is read out to those who cannot see it.
function showState(state, words) {
  const place = byId("state");
  if (place.textContent !== words) place.textContent = words;
  place.dataset.state = state;
}

function latencyCard(title, of, latency) {
  const number = (words, value) => element("div", {}, element("dt", {}, words), element("dd", {}, milliseconds(value)));
  return element("div", { class: "card" },
    element("h3", {}, title),
    element("dl", { class: "numbers" }, number("median", latency.median_s), number("95 %", latency.p95_s)),
    sparkline(latency.recent_s, title),
    element("p", { class: "quiet" }, latency.count ? `last ${latency.count} ${of}` : "nothing was asked yet"),
  );
}

function sparkline(values, title) {
  const svg = element("svg", { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", role: "img" });
  if (values.length < 2) {
    svg.setAttribute("aria-label", `${title}: too few values for a curve`);
    return svg;
  }
  const top = Math.max(...values) || 1;
  const x = (i) => (100 * i) / (values.length - 1);
  const points = values.map((value, i) => `${x(i).toFixed(2)},${(26 - (24 * value) / top).toFixed(2)}`).join(" ");
  svg.setAttribute("aria-label", `${title} of the last ${values.length} answers, at most ${milliseconds(top)}`);
  svg.append(
    element("polygon", { points: `0,28 ${points} 100,28` }),
    element("polyline", { points, "vector-effect": "non-scaling-stroke" }),
  );
  return svg;
}

function poolSection(pool) {
  const title = element("h2", { id: `pool-${pool.role}` }, pool.role, element("span", {}, ` ${pool.workers.length}`));
  return element("section", { "aria-labelledby": title.id },
    title,
    element("p", { class: "quiet" }, POOL_WORDS[pool.role] ?? ""),
    pool.workers.length
      ? element("ul", { class: "workers" }, ...pool.workers.map(workerItem))
      : element("p", { class: "none" }, "no worker is here"),
  );
}

function workerItem(worker) {
  const item = element("li", { class: "card" },
    element("p", { class: "worker" },
      element("strong", { translate: "no" }, worker.name),
      element("span", { class: "state", "data-state": worker.state }, worker.state)),
  );
  if (worker.num_blocks === null) {
    item.append(element("p", { class: "quiet" }, "has not reported yet"));
    return item;
  }
  const numUsed = worker.num_blocks - worker.num_free_blocks - worker.num_cached_blocks;
  const percent = Math.round(100 * numUsed / Math.max(1, worker.num_blocks));
  const load = [`${worker.num_sequences} ${worker.num_sequences === 1 ? "sequence" : "sequences"}`];
  if (worker.num_queued_tokens) load.push(`${worker.num_queued_tokens} prompt tokens to compute`);
  const fill = element("div", {});
  fill.style.width = `${percent}%`;
  item.append(
    element("div", { class: "meter", role: "meter", "aria-label": `KV cache of ${worker.name}`,
      "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": percent }, fill),
    element("p", { class: "quiet" }, `KV cache ${percent} % used · ${load.join(" · ")}`),
  );
  return item;
}

async function poll() {
  try {
    if (!document.hidden) {
      const response = await fetch("cluster", { cache: "no-store" });
      if (!response.ok) throw new Error(response.statusText);
      show(await response.json());
    }
  } catch {
    showState("unreachable", "the router does not answer");
  }
  setTimeout(poll, PERIOD_MS);
}

poll();
