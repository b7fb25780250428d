// Where an answer's time went: a bar to look at, and the same numbers to read. The stages add up to the whole.

import { element, milliseconds } from "./elements.js";

const STAGES = [
  ["queue", "Queue", "waiting for a pair of workers"],
  ["grant", "Grant", "the COMPLETION worker reserves its blocks"],
  ["prefill_queue", "Prefill queue", "waiting in the PROMPT worker"],
  ["prefill", "Prefill", "computing the prompt, up to the first token"],
  ["return", "Return", "the first token on its way"],
  ["transfer", "Transfer", "what is left of the KV after the first token"],
  ["first_decode", "First decode", "until the second token"],
  ["decode", "Decode", "all further tokens"],
];

export function stagesOf(timing) {
  return STAGES.map(([key, name, meaning]) => ({ key, name, meaning, seconds: timing[`${key}_s`] ?? 0 }));
}

export function timelineOf(timing) {
  const stages = stagesOf(timing);
  const bar = element("div", { class: "bar", "aria-hidden": "true" });
  const legend = element("ul", { class: "legend", "aria-label": "Where the time went" });
  for (const { key, name, meaning, seconds } of stages) {
    const part = element("div", { class: `stage-${key}`, "data-seconds": seconds, title: `${name}: ${milliseconds(seconds)}` });
    part.style.flexGrow = 1000 * seconds; // shares that add up to less than 1 would not fill the bar
    if (seconds > 0) bar.append(part);
    legend.append(element("li", { title: meaning },
      element("span", { class: `swatch stage-${key}`, "aria-hidden": "true" }),
      element("span", {}, `${name} `), element("b", {}, milliseconds(seconds))));
  }
  return element("div", { class: "timeline", "data-end": timing.end_s },
    bar, legend, element("p", { class: "quiet" }, summary(timing)));
}

function summary(timing) {
  const parts = [
    `first token after ${milliseconds(timing.ttft_s)}`,
    `${timing.num_prompt_tokens} + ${timing.num_output_tokens} tokens in ${milliseconds(timing.end_s)}`,
  ];
  if (timing.num_output_tokens > 1) {
    const rate = (timing.num_output_tokens - 1) / (timing.end_s - timing.ttft_s);
    if (Number.isFinite(rate)) parts.push(`${rate.toFixed(1)} tokens/s`);
  }
  if (timing.num_cached_tokens) parts.push(`${timing.num_cached_tokens} prompt tokens were cached`);
  if (timing.kv_share_hidden !== null) parts.push(`${Math.round(100 * timing.kv_share_hidden)} % of the KV moved during prefill`);
  if (timing.num_attempts > 1) parts.push(`${timing.num_attempts} attempts`);
  return parts.join(" · ");
}
