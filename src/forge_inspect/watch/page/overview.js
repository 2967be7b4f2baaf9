// Curves of the chosen runs, how their settings differ, and alerts.
import { PALETTE, chart, css, el, fill, meaning, number, seconds, select, table, visible } from "./parts.js";
import { ask, rowsOf } from "./data.js";

const PANELS = [
  ["reward and accuracy", ["reward", "accuracy", "eval/accuracy"]],
  ["loss", ["train/loss"]],
  ["entropy (nats)", ["train/entropy"]],
  ["KL to the reference (nats)", ["train/kl"]],
  ["clip fraction", ["train/clip_fraction"]],
  ["engine against trainer (nats, on-policy tokens)", ["train/engine_difference", "train/engine_difference_across_updates"]],
  ["gradient norm", ["train/grad_norm"]],
  ["policy age (versions)", ["policy_age", "policy_age/max"]],
  ["version of each policy", ["policy_version"]],
  ["groups without signal", ["groups_without_signal"]],
  ["completion length (tokens)", ["generation/completion_length"]],
  ["share cut at max_tokens", ["generation/truncated"]],
  ["tokens a second", ["generation/tokens_per_second", "train/tokens_per_second"]],
  ["share of the peak FLOP/s (MFU)", ["train/mfu", "generator/mfu"]],
];
const AXES = [["step", "step"], ["seconds", "wall time (min)"], ["tokens", "tokens (million)"], ["cpu_seconds", "CPU-seconds"]];
const DASHES = [undefined, [5, 3], [2, 2]];
const chosen = { axis: "step", smooth: 0, seeds: "each", extra: [] };

export function overview(context) {
  const results = el("div", { id: "results" }), alerts = el("div"), accounts = el("div"), compared = el("div"), grid = el("div", { className: "grid" }), pick = el("span");
  const node = el("div", {}, el("div", { className: "controls" },
    el("label", {}, "against", select(AXES, chosen.axis, (value) => { chosen.axis = value; draw(true); }, { id: "axis" })),
    el("label", {}, "smoothing", el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: chosen.smooth, id: "smooth",
      oninput: (event) => { chosen.smooth = Number(event.target.value); draw(true); } })),
    el("label", {}, "seeds", select([["each", "each"], ["mean", "mean"]], chosen.seeds, (value) => { chosen.seeds = value; draw(true); }, { id: "seeds" })),
    pick), results, alerts, accounts, grid, compared);
  const holders = new Map();
  let known = [], names = "";

  function draw(again = false) {
    const metrics = [...new Set(known.flatMap((one) => Object.keys(one.columns)))].sort();
    if (metrics.join() !== names) {
      names = metrics.join();
      pick.replaceChildren(el("label", {}, "add", select([["", "a metric …"], ...metrics], "", (value) => {
        if (value && !chosen.extra.includes(value)) chosen.extra.unshift(value);
        draw(true);
      }, { id: "metric" })));
    }
    const ends = known.filter((one) => one.columns.step).flatMap((one) => bounds(axis(one.columns)));
    const panels = [...chosen.extra.map((name) => [name, [name]]), ...PANELS];
    for (const [title, wanted] of panels) {
      const series = known.flatMap((one) => {
        const names = wanted.flatMap((metric) => [metric, ...policies(one).map((policy) => `${policy}/${metric}`)]);
        return names.filter((metric) => one.columns[metric]?.some((v) => v !== null))
          .map((metric) => line(one, metric, names.indexOf(metric), known.length > 1));
      });
      let card = holders.get(title);
      if (!series.length) {
        card?.remove();
        holders.delete(title);
        continue;
      }
      if (!card) {
        const close = () => { chosen.extra = chosen.extra.filter((name) => name !== title); holders.get(title).remove(); holders.delete(title); };
        card = el("section", { className: "card" }, el("h3", {}, el("span", { title: wanted.map(meaning).filter(Boolean).join("\n") }, visible(title)), chosen.extra.includes(title) && el("button", { title: "remove", onclick: close }, "×")), el("div"));
        holders.set(title, card);
        chosen.extra.includes(title) ? grid.prepend(card) : grid.append(card);
      }
      if (again) card.lastChild.plotKey = null;
      const band = known.length === 1 && chosen.axis === "step" ? bandOf(known[0], wanted) : [];
      chart(card.lastChild, [...band, ...(chosen.seeds === "mean" ? means(series) : series)], { bands: band.length / 2, xLabel: AXES.find(([name]) => name === chosen.axis)[1], ends });
    }
  }

  async function update() {
    const runs = context.chosen();
    known = (await Promise.all(runs.map(async (run) => ({
      run, colour: context.colour(run), columns: await rowsOf(run), about: await ask("run", { run }),
    }))));
    draw();
    const texts = known.map((one) => visible(`${known.length > 1 ? `${one.run}: ` : ""}${result(one)}`));
    fill(results, texts, () => texts.map((text) => el("p", {}, text)));
    fill(alerts, known.map((one) => [one.run, one.about.alerts]), () => known.flatMap((one) => one.about.alerts.map((alert) => el("div", { className: "alert" },
      el("b", {}, visible(known.length > 1 ? `${one.run}: ${alert.finding}` : alert.finding)), el("span", {}, visible(alert.advice))))));
    fill(accounts, known.map((one) => [one.run, one.about.account]), () => known.filter((one) => one.about.account).map((one) => el("p", { className: "quiet account" },
      visible(`${known.length > 1 ? `${one.run}: ` : "tokens: "}${one.about.account}`))));
    if (!known.some((one) => one.columns.step)) grid.replaceChildren(el("p", { className: "quiet" }, "No step was logged so far: the first one follows the start of all processes."));
    else grid.querySelector(":scope > p")?.remove();
    const answered = runs.length > 1 ? await ask("differences", { run: runs }) : null;
    const differ = answered && Object.fromEntries(Object.entries(answered).map(([key, values]) => [key, values.map(settingText)]).filter(([, values]) => values.some((value) => value !== values[0])));
    fill(compared, [runs, differ, known.map((one) => [one.columns.step?.length, one.about.settings])], () => [...(differ === null ? [] : [el("h2", {}, "Settings that differ"), Object.keys(differ).length
      ? table(["setting", ...runs.map(visible)], Object.entries(differ).map(([key, values]) => [visible(key), ...values]))
      : el("p", { className: "quiet" }, "None.")]), ...(known.length === 1 ? settings(known[0]) : [])]);
  }
  return { node, update };
}

// One sentence on a run: what it trains, for how long, and how held-out accuracy went.
function result({ about, columns }) {
  const last = (name) => columns[name]?.findLast((value) => value !== null), accuracies = (columns["eval/accuracy"] ?? []).filter((value) => value !== null);
  const model = about.settings.model ?? "a model from scratch", early = about.state === "finished" && about.steps > about.step ? ", before its last step, at its goal or the end of its data" : "";
  const parts = [`${about.ending || about.state}, step ${number(about.step)}${about.steps ? ` of ${about.steps}` : ""}${early}`, about.settings.algorithm ? `${settingText(about.settings.algorithm)} of ${model}` : model];
  if (last("seconds") !== undefined) parts.push(`${seconds(last("seconds"))}, last written ${new Date(about.written * 1000).toLocaleString()}`);
  if (accuracies.length) parts.push(`held-out accuracy ${number(accuracies[0], 3)}${accuracies.length > 1 ? ` at first, ${number(accuracies.at(-1), 3)} at last` : ""}`);
  if (about.reference) parts.push(`grey: ${about.reference.seeds} seeds of ${about.reference.name}`);
  return `${parts.join("; ")}.`;
}

// The lowest and the highest value of the seeds of the run's reference, for each of a panel's metrics.
function bandOf({ about, columns }, wanted) {
  const last = columns.step?.at(-1) ?? 0;
  return wanted.filter((metric) => about.reference?.bands[metric] && columns[metric]).flatMap((metric) => about.reference.bands[metric].map((values, i) => {
    const kept = values.map((value, k) => [k + 1, value]).filter(([step, value]) => value !== null && step <= last);
    return { label: `${metric} ${i}`, band: true, x: kept.map(([step]) => step), y: kept.map(([, value]) => value),
      colour: css("--line"), width: 0.5 };
  }));
}

// Policies that train beside the run's own: their metrics begin with their names.
function policies(one) {
  return Object.entries(one.about.settings).filter(([key, value]) => /^models\.[^.]+\.trains$/.test(key) && value === true)
    .map(([key]) => key.split(".")[1]);
}

function settings(one) {
  const last = Object.entries(one.columns).map(([name, values]) => [name, values.findLast((value) => value !== null)]);
  const open = document.getElementById("settings")?.open, openLast = document.getElementById("last")?.open;
  return [el("details", { id: "last", open: openLast }, el("summary", {}, "last values"), table(["metric", "value"], last.map(([name, value]) => [el("span", { title: meaning(name) }, visible(name)), number(value, 6)]), [1])),
    el("details", { id: "settings", open }, el("summary", {}, "configuration"), table(["setting", "value"], Object.entries(one.about.settings).map(([key, value]) => [visible(key), settingText(value)])))];
}

function line(one, metric, place, several) {
  const { columns } = one, xs = axis(columns), x = [], y = [];
  let total = 0, weight = 0;
  columns[metric].forEach((value, i) => {
    if (value === null || xs[i] === null || (x.length && xs[i] <= x[x.length - 1])) return;
    total = chosen.smooth * total + (1 - chosen.smooth) * value;
    weight = chosen.smooth * weight + (1 - chosen.smooth);
    x.push(xs[i]);
    y.push(total / weight);
  });
  const { seed, ...others } = Object.fromEntries(Object.entries(one.about.settings).filter(([key]) => !key.startsWith("run.")));
  return { help: meaning(metric), label: several ? `${one.run} ${metric}` : metric, metric, x, y, group: JSON.stringify(others),
    colour: several ? one.colour : PALETTE[place], dash: several ? DASHES[place] : undefined };
}

function axis(columns) {
  if (chosen.axis === "seconds") return columns.seconds.map((value) => value / 60);
  if (chosen.axis !== "tokens") return columns[chosen.axis] ?? columns.step.map(() => null);
  const tokens = columns["generation/tokens"] ?? columns["train/tokens"] ?? [];
  let sum = 0;
  return columns.step.map((_, i) => (sum += tokens[i] ?? 0) / 1e6);
}

// A setting as text; one that is null, empty or absent is a dash.
function settingText(value) {
  if (value === null || value === "" || value === "-") return "–";
  return visible(typeof value === "string" ? value : JSON.stringify(value));
}

// The first and the last known value.
function bounds(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? [known[0], known[known.length - 1]] : [];
}

// Runs that differ in their seed alone become thin lines and their mean.
function means(series) {
  const groups = new Map();
  for (const one of series) groups.set(one.group + one.metric, [...(groups.get(one.group + one.metric) ?? []), one]);
  return [...groups.values()].flatMap((group) => {
    if (group.length === 1) return group;
    const xs = [...new Set(group.flatMap((one) => one.x))].sort((a, b) => a - b);
    const at = group.map((one) => new Map(one.x.map((x, i) => [x, one.y[i]])));
    const y = xs.map((x) => { const found = at.map((map) => map.get(x)).filter((v) => v !== undefined); return found.reduce((a, b) => a + b, 0) / found.length; });
    const shared = chosen.axis === "step" ? [{ ...group[0], label: `mean of ${group.length} seeds ${group[0].metric}`, x: xs, y, colour: css("--text"), width: 2.2 }] : [];
    return [...group.map((one) => ({ ...one, width: 0.8 })), ...shared];
  });
}
