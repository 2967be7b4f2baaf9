// Ask the exported model, the one that the run started from, or the policy in training.
import { el, select, visible } from "./parts.js";
import { REPORT, ask } from "./data.js";

const MODELS = [["run", "the run's model"], ["base", "the model it started from"], ["live", "the policy in training"]];

export function chat(context) {
  if (REPORT) return { node: el("p", { className: "quiet" }, "A report cannot chat: start forge watch."), update: async () => {} };
  const sides = ["run", "base"].map((which) => ({ which, past: [], log: el("div") }));
  const text = el("textarea", { id: "ask", placeholder: "Ask both …" }), tokens = el("input", { className: "short", value: 256, id: "max_tokens" }), heat = el("input", { className: "short", value: 0, id: "temperature" }), send = el("button", { id: "send", onclick: () => ask_() }, "ask");

  async function one(side, words) {
    side.past.push({ role: "user", content: words });
    const answer = el("div", { className: "turn policy" }, el("small", {}, MODELS.find(([which]) => which === side.which)[1]), "…");
    side.log.append(el("div", { className: "turn" }, visible(words)), answer);
    try {
      const found = await ask("chat", {}, { run: context.run(), which: side.which, messages: side.past, max_tokens: Number(tokens.value), temperature: Number(heat.value) });
      side.past.push({ role: "assistant", content: found.text });
      answer.lastChild.replaceWith(visible(found.text));
      answer.append(el("small", {}, `${found.tokens} tokens, ended by ${visible(found.finish)}`));
    } catch (error) {
      side.past.pop();
      answer.lastChild.replaceWith(el("span", { className: "bad" }, visible(error.message)));
    }
  }

  async function ask_() {
    const words = text.value;
    if (!words || send.disabled) return;
    send.disabled = true;
    await Promise.all(sides.map((side) => one(side, words)));
    send.disabled = false;
  }
  const restart = (side, which) => { side.which = which; side.past = []; side.log.replaceChildren(); };
  text.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask_(); });
  const node = el("div", {}, text, el("div", { className: "controls" }, send, el("label", {}, "most tokens", tokens), el("label", {}, "temperature", heat), el("button", { onclick: () => sides.forEach((side) => restart(side, side.which)) }, "begin again")),
    el("div", { className: "two" }, sides.map((side) => el("section", {}, select(MODELS, side.which, (value) => restart(side, value)), side.log))));
  return { node, update: async () => {} };
}
