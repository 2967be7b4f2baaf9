// Ask the exported model, the one that the run started from, or the policy in training.
import { el, select, visible } from "./parts.js";
import { REPORT, ask } from "./data.js";

const FIELD = /\{\w*\}/; // of a template
const MAX_TOKENS = 256; // of an answer, where the run sampled none

const MODELS = [["run", "the run's model"], ["base", "the model it started from"]];

export function chat(context) {
  if (REPORT) return { node: el("p", { className: "quiet" }, "A report cannot chat: start forge watch."), update: async () => {} };
  const sides = ["run", "base"].map((which) => ({ which, past: [], log: el("div") }));
  const text = el("textarea", { id: "ask", placeholder: "Ask both … Enter sends, Shift-Enter begins a new line." }), send = el("button", { id: "send", onclick: () => ask_() }, "ask");
  const tokens = el("input", { className: "short", id: "max_tokens" }), heat = el("input", { className: "short", id: "temperature" });
  const template = el("input", { className: "long", id: "template", title: "What is sent: the first field in braces is replaced by your text, as in the run's prompts." });
  let system = null, known = false;

  // The run's own sampling and prompts, until the user changes them.
  async function update() {
    if (known) return;
    const { settings } = await ask("run", { run: context.run() });
    known = true;
    const sampled = Object.keys(settings).filter((key) => /^\w+\.max_tokens$/.test(key)).map((key) => key.split(".")[0]).find((name) => `${name}.temperature` in settings);
    tokens.value ||= settings[`${sampled}.max_tokens`] ?? MAX_TOKENS;
    heat.value ||= settings[`${sampled}.temperature`] ?? 0;
    const written = settings["dataset.prompt_template"] ?? "";
    template.value ||= written.split(FIELD).length === 2 ? written : "{question}";
    system = settings["dataset.system_prompt"] ?? null;
  }

  async function one(side, words) {
    side.past.push({ role: "user", content: words });
    const answer = el("div", { className: "turn policy" }, el("small", {}, MODELS.find(([which]) => which === side.which)[1]), "…");
    side.log.append(el("div", { className: "turn" }, visible(words)), answer);
    try {
      const found = await ask("chat", {}, { run: context.run(), which: side.which, messages: [...(system ? [{ role: "system", content: system }] : []), ...side.past], max_tokens: Number(tokens.value), temperature: Number(heat.value) });
      side.past.push({ role: "assistant", content: found.text });
      answer.lastChild.replaceWith(visible(found.text));
      answer.append(el("small", {}, `${found.tokens} tokens, ended by ${visible(found.finish)}`));
    } catch (error) {
      side.past.pop();
      answer.lastChild.replaceWith(el("span", { className: "bad" }, visible(error.message)));
    }
  }

  async function ask_() {
    if (!text.value || send.disabled) return;
    send.disabled = true;
    const words = FIELD.test(template.value) ? template.value.replace(FIELD, () => text.value) : text.value;
    await Promise.all(sides.map((side) => one(side, words)));
    send.disabled = false;
  }
  const restart = (side, which) => { side.which = which; side.past = []; side.log.replaceChildren(); };
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask_();
  });
  const node = el("div", {}, text, el("div", { className: "controls" }, send, el("label", {}, "most tokens", tokens), el("label", {}, "temperature", heat), el("label", {}, "template", template), el("button", { onclick: () => sides.forEach((side) => restart(side, side.which)) }, "begin again")),
    el("div", { className: "two" }, sides.map((side) => el("section", {}, select(MODELS, side.which, (value) => restart(side, value)), side.log))));
  return { node, update };
}
