// All recorded rollouts: filters, the distribution of rewards, pages.
import { el, fill, number, percent, select, visible } from "./parts.js";
import { ask } from "./data.js";

const COLUMNS = [["step", "step", 1], ["group", "group", 1], [null, "sample", 1], ["reward", "reward", 1], ["advantage", "advantage", 1], ["length", "tokens", 1], ["version", "version", 1], [null, "trained", 0], [null, "prompt and response", 0]];
const RANGES = [["step", "step"], ["reward", "reward"], ["advantage", "advantage"], ["length", "tokens"], ["version", "version"], ["group", "group"]];
export const REASONS = {
  zero_advantage: "advantage 0", no_signal: "replaced: equal rewards", too_old: "too old", unscored: "unscored", repeated: "came twice", forgotten: "forgotten at a resume",
};
const asked = { sort: "step", down: "1", page: 0 };

export function rollouts(context) {
  const counted = el("span", { className: "quiet", id: "count" }), bars = el("div", { className: "bars" }), edges = el("div", { className: "keys" });
  const body = el("tbody"), head = el("tr"), reasons = el("span"), pages = el("span");
  const later = (name) => (event) => { asked[name] = event.target.value.trim(); asked.page = 0; clearTimeout(later.timer); later.timer = setTimeout(update, 150); };
  const range = ([name, text]) => el("label", {}, text, ["min", "max"].map((bound) => el("input", { className: "short", id: `${name}_${bound}`, inputMode: "decimal", placeholder: bound,
    value: asked[`${name}_${bound}`] ?? "", oninput: later(`${name}_${bound}`) })));
  const clear = () => { for (const name of Object.keys(asked)) if (!["sort", "down"].includes(name)) delete asked[name]; node.querySelectorAll(".controls input").forEach((input) => { input.value = ""; }); update(); };
  const node = el("div", {}, el("div", { className: "controls" }, el("label", {}, "text", el("input", { className: "long", id: "text", type: "search", value: asked.text ?? "", oninput: later("text") })), reasons, el("button", { onclick: clear }, "clear"), el("details", { className: "ranges", open: innerWidth > 820 }, el("summary", {}, "ranges"), el("div", {}, RANGES.map(range)))),
    el("section", { className: "card" }, el("h3", {}, "rewards", counted), bars, edges), el("div", { className: "scroll" }, el("table", { id: "found" }, el("thead", {}, head), body)), el("div", { className: "controls" }, pages));
  let known = "";

  async function update() {
    const found = await ask("rollouts", { run: context.run(), ...asked });
    counted.textContent = `${found.total} of ${found.all}`;
    if (known !== found.reasons.join()) {
      known = found.reasons.join();
      reasons.replaceChildren(el("label", {}, "trained", select([["", "all"], ["trained", "trained"], ["dropped", "not trained"], ...found.reasons.map((one) => [one, `not: ${REASONS[one] ?? one}`])], asked.reason ?? "", (value) => { asked.reason = value; asked.page = 0; update(); }, { id: "reason" })));
    }
    fill(bars, [found.histogram], () => histogram(found.histogram));
    fill(head, [asked.sort, asked.down], () => COLUMNS.map(([sort, text, numeric]) => el("th", { className: numeric ? "n" : "", "data-sort": sort, title: text === "group" ? "number among the prompts that the run has drawn, not a row of a file" : null, onclick: sort && (() => {
      asked.down = asked.sort === sort && asked.down === "1" ? "" : "1";
      asked.sort = sort;
      update();
    }) }, text, sort === asked.sort ? (asked.down === "1" ? " ↓" : " ↑") : "")));
    fill(body, found.rows, () => found.rows.map((row) => el("tr", { className: "link", tabIndex: 0, onclick: () => context.open(row.row), onkeydown: (event) => event.key === "Enter" && context.open(row.row) },
      ...[row.step, row.group, row.policy ? `${row.sample} ${visible(row.policy)}` : row.sample, number(row.reward), number(row.advantage, 3), row.length, row.version].map((cell, i) => el("td", { className: "n", "data-label": COLUMNS[i][1] }, String(cell ?? "–"))),
      el("td", { "data-label": "trained" }, row.dropped ? el("span", { className: "tag", title: visible(row.dropped) }, visible(REASONS[row.dropped] ?? row.dropped)) : row.advantage === 0 ? el("span", { className: "tag" }, "yes, advantage 0") : el("span", { className: "good" }, "yes")),
      el("td", { className: "text" }, el("div", { className: "quiet" }, visible((row.prompt ?? "").slice(0, 200))), el("div", {}, visible((row.written || written(row)).slice(0, 200)))))));
    const last = Math.max(0, Math.ceil(found.total / 50) - 1), go = (by) => () => { asked.page = (asked.page || 0) + by; update(); };
    fill(pages, [asked.page, last], () => [el("button", { onclick: go(-1), disabled: !asked.page }, "‹ before"), ` page ${(asked.page || 0) + 1} of ${last + 1} `, el("button", { onclick: go(1), disabled: (asked.page || 0) >= last }, "next ›")]);
    if (found.all && !found.total) fill(body, 1, () => [el("tr", {}, el("td", { colSpan: 9, className: "quiet" }, "No rollout passes these filters."))]);
    if (!found.all) fill(body, 0, () => [el("tr", {}, el("td", { colSpan: 9, className: "quiet" }, "No rollouts were recorded: metrics.rollouts says how many are, in recipes that sample."))]);
  }

  function histogram(found) {
    edges.replaceChildren(...(found ? [el("span", {}, number(found.edges[0], 3)), el("span", { style: { "margin-left": "auto" } }, number(found.edges.at(-1), 3))] : [el("span", {}, "no rewards")]));
    if (!found) return [];
    const most = Math.max(...found.counts), total = found.counts.reduce((a, b) => a + b, 0);
    return found.counts.map((count, i) => {
      const [low, high] = [found.edges[i], found.edges[i + 1]];
      return el("button", { title: `${number(low, 3)} to ${number(high, 3)}: ${count}, ${percent(count / total)}`, style: { height: `${count ? 4 + (96 * count) / most : 0}%` }, disabled: !count,
        onclick: () => { for (const [bound, value] of [["min", low], ["max", high]]) node.querySelector(`#reward_${bound}`).value = asked[`reward_${bound}`] = String(value); asked.page = 0; update(); } });
    });
  }
  return { node, update };
}

// What the policy wrote, with its special tokens where each token is readable text.
function written(row) {
  const text = (row.texts ?? []).filter((_, i) => row.mask[i]).join("");
  return text && !text.includes("\ufffd") ? text : row.response ?? "";
}
