// The chat: one conversation, its answers streamed from the public endpoint like any client's.

import { element } from "./elements.js";
import { timelineOf } from "./timeline.js";

const byId = (id) => document.getElementById(id);
const conversation = byId("conversation"), question = byId("question");
let messages = []; // what the model is given: the turns so far
let running = null; // the AbortController of the answer that is being written

function turn(role, words) {
  const text = element("div", { class: "text" });
  const article = element("article", { class: role }, element("h3", {}, words), text);
  byId("welcome").hidden = true;
  conversation.append(article);
  conversation.scrollTop = conversation.scrollHeight;
  return { article, text };
}

// Follows the text down, unless the reader has scrolled up.
function keepingBottom(change) {
  const isAtBottom = conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < 40;
  change();
  if (isAtBottom) conversation.scrollTop = conversation.scrollHeight;
}

const note = (kind, words) => element("p", { class: kind }, words);

function setRunning(controller) {
  running = controller;
  conversation.setAttribute("aria-busy", String(controller !== null));
  const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
  byId("send").hidden = controller !== null;
  byId("stop").hidden = controller === null;
  if (hadFocus) (controller === null ? question : byId("stop")).focus();
}

async function ask(content) {
  const turns = messages; // a new conversation may begin meanwhile
  turns.push({ role: "user", content });
  turn("user", "You").text.textContent = content;
  const { article, text } = turn("assistant", "Model");
  const controller = new AbortController();
  setRunning(controller);
  const answer = { text: "", timing: null, finishReason: null, error: null };
  try {
    await stream(turns, controller.signal, answer, () => keepingBottom(() => { text.textContent = answer.text; }));
  } catch (error) {
    answer.error = controller.signal.aborted ? null : wordsFor(error);
  }
  keepingBottom(() => {
    if (controller.signal.aborted) article.append(note("quiet", "Stopped."));
    else if (answer.error) article.append(note("error", answer.error));
    else if (answer.finishReason === "length") article.append(note("quiet", "The answer was cut at its token limit."));
    if (answer.timing) article.append(timelineOf(answer.timing));
  });
  if (answer.text) turns.push({ role: "assistant", content: answer.text });
  else turns.pop();
  setRunning(null);
}

async function stream(turns, signal, answer, changed) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "content-type": "application/json" },
    body: JSON.stringify({
      messages: turns,
      max_tokens: byId("max-tokens").valueAsNumber || 256,
      temperature: Number.isFinite(byId("temperature").valueAsNumber) ? byId("temperature").valueAsNumber : 0.7,
      stream: true,
      stream_options: { include_usage: true },
      timing: true,
    }),
  });
  if (!response.ok) throw new Refused(response, await response.json().catch(() => null));
  let isDone = false;
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") {
      isDone = true;
      break;
    }
    take(JSON.parse(data), answer);
    changed();
  }
  if (!isDone) throw new Error("the stream broke off");
}

function take(chunk, answer) {
  if (chunk.error) throw new Refused(null, chunk);
  answer.timing = chunk.timing ?? answer.timing;
  for (const choice of chunk.choices) {
    answer.text += choice.delta?.content ?? "";
    answer.finishReason = choice.finish_reason ?? answer.finishReason;
  }
}

// The data of server-sent events; comments keep the connection open and say nothing.
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

class Refused extends Error {
  constructor(response, body) {
    super(body?.error?.message ?? `The router answered with status ${response?.status}.`);
    this.retryAfter = response?.headers.get("retry-after");
  }
}

function wordsFor(error) {
  if (!(error instanceof Refused)) return "The connection to the router was lost. Is the cluster running?";
  return error.retryAfter ? `${error.message} Try again in ${error.retryAfter} s.` : error.message;
}

function submit() {
  const content = question.value.trim();
  if (!content || running) return;
  question.value = "";
  ask(content);
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  for (const article of conversation.querySelectorAll("article")) article.remove();
  byId("welcome").hidden = false;
  question.focus();
});
