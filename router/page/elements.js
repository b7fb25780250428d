// Elements and numbers. Text goes in as text nodes only, so nothing that a model says can become markup.

const SVG = new Set(["svg", "polyline", "polygon"]);

export function element(name, attributes = {}, ...children) {
  const made = SVG.has(name) ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 1) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const ms = 1000 * seconds;
  return `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
}
