// The answers to held-out problems at each evaluation.
import { el, fill, number, select, visible } from "./parts.js";
import { ask } from "./data.js";

const VERDICTS = [["", "all"], ["right", "right"], ["wrong", "wrong"], ["unknown", "not known"]];
const viewed = { set: "", step: "", verdict: "", page: 0 };
const ANSWER_COLUMNS = [["problem", 1], ["right", 0], ["at first", 0], ["reward", 1], ["tokens", 1], ["target", 0], ["prompt and answer", 0]];

const verdictOf = (correct) => (correct === null || correct === undefined ? el("span", { className: "quiet" }, "–") : el("span", { className: correct ? "good" : "bad" }, correct ? "yes" : "no"));

export function heldOut(context) {
  const sets = el("span"), steps = el("span"), counted = el("span", { className: "quiet", id: "answers" }), body = el("tbody"), pages = el("span");
  const open = new Set();
  const choose = (name) => (value) => { viewed[name] = value; viewed.page = 0; update(); };
  const node = el("div", {}, el("div", { className: "controls" }, sets, steps, el("label", {}, "right", select(VERDICTS, viewed.verdict, choose("verdict"), { id: "verdict" })), counted),
    el("div", { className: "scroll" }, el("table", { id: "held-out" }, el("thead", {}, el("tr", {}, ANSWER_COLUMNS.map(([text, numeric]) => el("th", { className: numeric ? "n" : "" }, text)))), body)), el("div", { className: "controls" }, pages));

  async function update() {
    const found = await ask("held_out", { run: context.run(), ...viewed });
    const shown = found.rows.filter((row) => row.response !== undefined);
    const chooseSet = (name) => { viewed.step = ""; choose("set")(name); };
    fill(sets, [found.sets, found.set], () => ((found.sets ?? []).length > 1 ? [el("label", {}, "problems", select(found.sets.map((name) => [name, name || "eval"]), found.set, chooseSet, { id: "set" }))] : []));
    fill(steps, [found.steps, found.step], () => [el("label", {}, "step", select(found.steps.map(String), String(found.step), choose("step"), { id: "step" }))]);
    counted.textContent = `${found.total} of ${found.all}`;
    fill(body, [shown, [...open]], () => shown.flatMap((row) => {
      const key = `${row.step} ${row.problem}`, toggle = () => { open.has(key) ? open.delete(key) : open.add(key); update(); };
      const cells = [String(row.problem), verdictOf(row.correct), verdictOf(row.before), number(row.reward), `${number(row.tokens)}${row.finish === "length" ? ", cut" : ""}`, visible((row.target ?? "").slice(0, 70))]
        .map((cell, i) => el("td", { className: ANSWER_COLUMNS[i][1] ? "n" : i === 5 ? "short" : "", "data-label": ANSWER_COLUMNS[i][0] }, cell));
      cells.push(el("td", { className: "text" }, el("div", { className: "quiet" }, visible((row.prompt ?? "").slice(0, 200))), el("div", {}, visible((row.response ?? "").slice(0, 200)))));
      const line = el("tr", { className: "link", tabIndex: 0, "aria-expanded": String(open.has(key)), onclick: toggle, onkeydown: (event) => event.key === "Enter" && toggle() }, ...cells);
      const whole = [["prompt", row.prompt], ["target", row.target], ["answer", row.response]].map(([name, text]) => [el("p", { className: "quiet" }, name), el("pre", {}, visible(text))]);
      return open.has(key) ? [line, el("tr", {}, el("td", { colSpan: ANSWER_COLUMNS.length }, ...whole.flat()))] : [line];
    }));
    const last = Math.max(0, Math.ceil(found.total / 50) - 1), go = (by) => () => { viewed.page = (viewed.page || 0) + by; update(); };
    fill(pages, [viewed.page, last], () => [el("button", { onclick: go(-1), disabled: !viewed.page }, "‹ before"), ` page ${(viewed.page || 0) + 1} of ${last + 1} `, el("button", { onclick: go(1), disabled: (viewed.page || 0) >= last }, "next ›")]);
    if (found.all && !found.total) fill(body, 1, () => [el("tr", {}, el("td", { colSpan: ANSWER_COLUMNS.length, className: "quiet" }, "No answer passes this filter."))]);
    if (!found.steps.length) fill(body, 0, () => [el("tr", {}, el("td", { colSpan: ANSWER_COLUMNS.length, className: "quiet" }, "No held-out answers were recorded: eval.problems and eval.every say which are made, in recipes that sample."))]);
  }
  return { node, update };
}
