// Elements, numbers as text, and charts. All text of a run enters the page as text.
import { METRICS } from "./metrics.js";

export const PALETTE = ["#4c78b8", "#d9823b", "#4a9d6d", "#a567b0", "#c7525f", "#38a0ae", "#b09426", "#78808c"];
// Control characters, ANSI escapes among them, and what changes the direction of text are shown as symbols.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

export function visible(text) {
  return String(text ?? "").replace(HIDDEN, (letter) => {
    const code = letter.charCodeAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}

// New children only where what they show has changed: focus and selections stay.
export function fill(node, state, make) {
  const key = JSON.stringify(state);
  if (node.filled === key) return;
  node.filled = key;
  node.replaceChildren(...make().filter(Boolean));
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

// A duration, in the unit that suits `most`, such as the longest in its table.
export function seconds(value, most = value) {
  if (value === 0) return "0 s";
  if (most < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (most < 1) return `${(value * 1e3).toFixed(0)} ms`;
  if (most < 120) return `${value.toFixed(most < 10 ? 2 : 1)} s`;
  return most < 7200 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`;
}

// What a metric means; NAME stands for any name and N or K for a number, and a policy's name may come first.
const MEANINGS = new Map(Object.entries(METRICS)), PATTERNS = [...MEANINGS].map(([name, text]) => [new RegExp(`^${name.replace(/\bNAME\b/g, "[^/]+").replace(/\b[NK]\b/g, "\\d+")}$`), text]);
export function meaning(metric) {
  const short = metric.slice(metric.indexOf("/") + 1);
  return MEANINGS.get(metric) ?? PATTERNS.find(([pattern]) => pattern.test(metric))?.[1] ?? MEANINGS.get(short) ?? null;
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function table(heads, rows, numeric = []) {
  const kind = (i) => (numeric.includes(i) ? "n" : "");
  return el("div", { className: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, heads.map((head, i) => el("th", { className: kind(i) }, head)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => el("td", { className: kind(i) }, cell)))))));
}

export function select(values, chosen, onchange, attributes = {}) {
  const pairs = values.map((value) => (Array.isArray(value) ? value : [value, value]));
  return el("select", { ...attributes, onchange: (event) => onchange(event.target.value) },
    pairs.map(([value, text]) => el("option", { value, selected: value === chosen }, visible(text))));
}

// A chart of series {label, x, y, colour, width, dash, help, band}; values may be null. The x axis shows at least the values `ends`.
// The space within the first `bands` pairs of series is filled; these have `band` set, and are not in the legend.
export function chart(holder, series, { height = 190, xLabel = "", ends = [], bands = 0 } = {}) {
  const joined = series.length ? uPlot.join([...series.map((one) => [one.x, one.y]), [ends]]) : [[]];
  const key = JSON.stringify([xLabel, series.map((one) => [one.label, one.colour, one.width])]);
  if (holder.plot && holder.plotKey === key) {
    holder.plot.setData(joined);
    return;
  }
  holder.plot?.destroy();
  const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  holder.plotKey = key;
  holder.plot = new uPlot({
    width: Math.max(200, holder.clientWidth), height,
    scales: { x: { time: false }, y: { range: (_, low, high) => (low === null ? [0, 1] : low === high ? [low && low - Math.abs(low) / 2, low ? low + Math.abs(low) / 2 : 1] : uPlot.rangeNum(low, high, 0.1, true)) } },
    bands: Array.from({ length: bands }, (_, i) => ({ series: [2 * i + 2, 2 * i + 1], fill: css("--line") })),
    cursor: { sync: { key: "x" }, points: { size: 5 }, drag: { x: true, y: false } },
    axes: [{ ...axis, size: 26, label: xLabel, labelSize: 16, labelFont: "11px system-ui", labelGap: -2 }, { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => number(tick, 3)) }],
    legend: { markers: { width: 2, dash: (_, i) => styleOf(series[i - 1]?.dash) } },
    series: [{ label: xLabel, value: pointed }, ...series.map((one) => ({
      label: visible(one.label), stroke: one.colour, width: one.width ?? 1.6, dash: one.dash, spanGaps: true,
      points: { show: !one.band && one.y.filter((value) => value !== null).length < 40, size: 4 }, value: pointed,
    }))],
  }, joined, holder);
  holder.querySelectorAll(".u-series").forEach((row, i) => { row.title = series[i - 1]?.help ?? ""; if (series[i - 1]?.band) row.style.display = "none"; });
  if (!holder.watched) {
    holder.watched = new ResizeObserver(() => holder.plot.setSize({ width: Math.max(200, holder.clientWidth), height }));
    holder.watched.observe(holder);
  }
}

// The value under the pointer, without one the last that is known.
function pointed(plot, value, place, index) {
  return number(index === null ? plot.data[place].findLast((one) => one !== null && one !== undefined) : value);
}

// The border of a marker in the legend that looks as the line does.
function styleOf(dash) {
  if (!dash) return "solid";
  return dash[0] > 2 ? "dashed" : "dotted";
}
