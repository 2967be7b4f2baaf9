// The answers to held-out problems at each evaluation.
import { el, fill, number, select, visible } from "./parts.js";
import { ask } from "./data.js";

const VERDICTS = [["", "all"], ["right", "right"], ["wrong", "wrong"], ["unknown", "not known"]];
const viewed = { set: "", step: "", verdict: "", page: 0 };
const ANSWER_COLUMNS = [["problem", 1], ["right", 0], ["at first", 0], ["reward", 1], ["tokens", 1], ["prompt", 0], ["target", 0], ["answer", 0]];

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
      const cells = [el("td", { className: "n" }, String(row.problem)), el("td", {}, verdictOf(row.correct)), el("td", {}, verdictOf(row.before)), el("td", { className: "n" }, number(row.reward)), el("td", { className: "n" }, `${number(row.tokens)}${row.finish === "length" ? ", cut" : ""}`),
        el("td", { className: "text" }, visible((row.prompt ?? "").slice(-70))), el("td", { className: "text" }, visible((row.target ?? "").slice(0, 70))), el("td", { className: "text" }, visible((row.response ?? "").slice(0, 160)))];
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
