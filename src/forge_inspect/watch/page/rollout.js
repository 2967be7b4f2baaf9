// One rollout: what was said, every token with all that is known of it, and why it did or did not train.
import { css, el, number, percent, select, table, visible } from "./parts.js";
import { ask } from "./data.js";
import { REASONS } from "./rollouts.js";

const MOST = 4000; // tokens that are shown at first
// Field, its name, whether colours run from blue over nothing to red (2) or from nothing to blue (1).
const FIELDS = [
  ["advantages", "advantage", 2], ["difference", "engine − trainer (nats)", 2], ["engine_logprobs", "log-prob., engine", 1], ["logprobs", "log-prob., trainer", 1], ["entropy", "entropy (nats)", 1],
  ["ratio", "ratio to the sampler", 2], ["clip_fraction", "cut by the clip", 1], ["correction_fraction", "cut by the correction", 1], ["loss", "part of the loss", 2], ["weights", "share of the loss", 1],
  ["versions", "policy version", 1], ["ref_logprobs", "log-prob., reference", 1], ["values", "value (critic)", 2], ["returns", "return", 2],
];
let shown = "advantages";

export function rollout(context) {
  const node = el("div");
  let key = "";

  async function update() {
    const wanted = `${context.run()} ${context.row()}`;
    if (key === wanted) return; // it does not change
    const [row, group] = await Promise.all([ask("rollout", { run: context.run(), row: context.row() }), ask("group", { run: context.run(), row: context.row() })]);
    if (!row) throw new Error("this report does not contain that rollout");
    key = wanted;
    draw(row, group);
  }

  function draw(row, group) {
    row.difference = row.engine_logprobs.map((value, i) => (value === null || row.logprobs[i] === null ? null : value - row.logprobs[i]));
    const origins = JSON.parse(row.origins), parts = Object.entries(JSON.parse(row.parts));
    const facts = [["reward", number(row.reward)], ...parts.map(([name, part]) => [`· ${visible(name)}`, number(part)]), ["advantage", number(row.advantage)], ["target", visible(row.target)], ["ended by", visible(row.finish) || "–"],
      ["tokens", `${row.length} by the policy, ${row.tokens.length - row.length} of context`],
      ...origins.map(([version, identity, who]) => [`version ${version}`, el("span", { title: visible(identity) }, `weights ${visible(identity.slice(0, 12)) || "of unknown identity"}${who ? `, by ${visible(who)}` : ""}`)])];
    const pictures = group.flatMap((one) => JSON.parse(one.images ?? "[]")).filter((source) => source.startsWith("data:image/"));
    node.replaceChildren(el("p", {}, el("a", { href: "#", onclick: (event) => { event.preventDefault(); context.open(null); } }, "‹ all rollouts"), ` step ${row.step}, group ${row.group}, sample ${row.sample}`, row.branch ? `, ${row.branch} rewrites of the conversation before its end` : ""),
      el("div", { className: "why" }, reasons(row, group).map((text) => el("p", {}, text))),
      el("div", { className: "two" }, el("div", {}, table(["", ""], facts)), el("div", {}, pictures.map((source) => el("img", { src: source, className: "picture" })), conversation(row))),
      el("h2", {}, "Tokens"), strip(row), el("h2", {}, `The group: ${group.length} samples of this prompt`),
      el("div", { className: "group" }, group.map((one) => el("section", { className: "card", tabIndex: 0, "aria-current": one.row === row.row, onclick: () => context.open(one.row), onkeydown: (event) => event.key === "Enter" && context.open(one.row) },
        el("h3", {}, `sample ${one.sample}${one.branch ? `, branch −${one.branch}` : ""}`, el("span", {}, number(one.reward))), el("small", { className: "quiet" }, `advantage ${number(one.advantage, 3)}, ${one.length} tokens${one.dropped ? `, not trained: ${visible(REASONS[one.dropped] ?? one.dropped)}` : ""}`),
        el("div", { className: "turn" }, visible(one.response))))));
  }
  return { node, update };
}

// Pieces of text that the policy wrote, and what came between them.
function conversation(row) {
  const turns = JSON.parse(row.turns), pieces = [];
  row.mask.forEach((own, i) => {
    if (!pieces.length || pieces.at(-1).own !== own) pieces.push({ own, start: i, text: "" });
    pieces.at(-1).text += row.texts[i];
  });
  return pieces.map((piece) => {
    const turn = turns.find(([start]) => start === piece.start);
    const head = piece.own ? `policy${turn ? `, turn of version ${turn[2]}, ended by ${turn[3]}${turn[4] ? `, reward ${number(turn[4])}` : ""}` : ""}` : pieces[0] === piece ? "prompt" : "environment";
    return el("div", { className: piece.own ? "turn policy" : "turn" }, el("small", {}, visible(head)), visible(piece.text));
  });
}

function strip(row) {
  const detail = el("section", { className: "card" }, el("p", { className: "quiet" }, "Point at a token.")), tokens = el("div", { className: "strip" }), range = el("span", { className: "quiet" });
  const there = FIELDS.filter(([name]) => row[name].some((value) => value !== null));
  if (!there.some(([name]) => name === shown)) shown = there[0]?.[0] ?? "versions";

  function paint(many) {
    const values = row[shown].slice(0, many), [, , kind] = FIELDS.find(([name]) => name === shown), middle = shown === "ratio" ? 1 : 0;
    const known = values.filter((value, i) => value !== null && row.mask[i]), size = (value) => Math.abs(value - middle);
    const low = kind === 1 ? Math.min(...known) : 0, high = kind === 1 ? Math.max(...known) : Math.max(...known.map(size));
    range.textContent = known.length ? `${number(Math.min(...known), 3)} to ${number(Math.max(...known), 3)}` : "nothing is known";
    tokens.replaceChildren(...values.map((value, i) => {
      const own = row.mask[i], share = value === null || !own || high === low ? 0 : kind === 1 ? (value - low) / (high - low) : size(value) / high;
      const colour = kind === 2 && value > middle ? "217 130 59" : "76 120 184";
      return el("span", { className: `${own ? "" : "context"}${row.clip_fraction[i] > 0 || row.correction_fraction[i] > 0 ? " cut" : ""}`, style: { background: share ? `rgb(${colour} / ${(0.08 + 0.6 * share).toFixed(2)})` : null },
        onpointerenter: (event) => point(i, event.target) }, visible(row.texts[i]).replace(/\n/g, "↵\n").replace(/^ | $/g, "\u00a0"));
    }));
    if (row.tokens.length > many) tokens.append(el("button", { onclick: () => paint(row.tokens.length) }, `show all ${row.tokens.length} tokens`));
  }

  function point(i, span) {
    tokens.querySelector(".on")?.classList.remove("on");
    span.classList.add("on");
    const identity = JSON.parse(row.origins).find(([version]) => version === row.versions[i]);
    const lines = [["token", `${row.tokens[i]} ${JSON.stringify(visible(row.texts[i]))}`], ["position", i], ["mask", row.mask[i] ? "trained" : "context"],
      ...FIELDS.filter(([name]) => row[name][i] !== null && row.mask[i]).map(([name, text]) => [text, number(row[name][i], 5)]), ...(identity ? [["weights", visible(identity[1]) || "unknown"], ["sampled by", visible(identity[2])]] : [])];
    detail.replaceChildren(el("h3", {}, `token ${i}`), table(["", ""], lines), el("p", {}, tokenReason(row, i)));
  }
  paint(MOST);
  return el("div", {}, el("div", { className: "controls" }, el("label", {}, "colour", select(there, shown, (value) => { shown = value; paint(MOST); }, { id: "field" })), range,
    el("span", { className: "quiet" }, "Grey: context. Wavy: cut by the clip or the correction.")), el("div", { className: "pair" }, tokens, detail));
}

function tokenReason(row, i) {
  if (!row.mask[i]) return "Not trained: the policy did not write it.";
  if (row.dropped) return "Not trained: its sequence was left out.";
  if (row.weights[i] === 0) return "Not trained: its share of the loss is 0.";
  const cut = row.clip_fraction[i] > 0 ? "The clip cut its gradient: the ratio left the allowed range." : row.correction_fraction[i] > 0 ? "The correction bounded its weight: sampler and trainer disagree." : "";
  if (row.advantages[i] === 0) return "Its advantage is 0: no gradient from the reward.";
  return cut || `Trained: it became ${row.advantages[i] > 0 ? "more" : "less"} probable, as its advantage is ${row.advantages[i] > 0 ? "positive" : "negative"}.`;
}

function reasons(row, group) {
  const rewards = group.map((one) => one.reward).filter((value) => value !== null), equal = rewards.length > 1 && rewards.every((value) => value === rewards[0]), share = (many) => percent(many / Math.max(1, row.length));
  const why = {
    zero_advantage: equal ? `Not trained: all ${rewards.length} samples of the group have the reward ${number(rewards[0])}, so that none is better than another and every advantage is 0.` : "Not trained: its advantage is 0, and the loss has no other term.",
    no_signal: `Not trained: all samples of the group have the reward ${number(rewards[0])}. Another prompt took its place (dynamic sampling).`,
    too_old: "Not trained: its weights were older than async.max_policy_age when its turn came.", unscored: "Not trained: the reward gave no score. The log has the reason.", repeated: "Not trained: this prompt had come in before.",
  };
  if (row.dropped) return [why[row.dropped] ?? `Not trained: ${visible(row.dropped)}.`];
  const count = (name) => row[name].filter((value) => value > 0).length, found = [];
  if (row.advantage !== null) found.push(`Trained in step ${row.step}: its reward ${number(row.reward)} is ${row.advantage > 0 ? "above" : row.advantage < 0 ? "below" : "at"} the baseline (advantage ${number(row.advantage, 3)}), so its tokens became ${row.advantage > 0 ? "more" : row.advantage < 0 ? "less" : "neither more nor less"} probable.`);
  if (count("clip_fraction")) found.push(`The clip cut ${count("clip_fraction")} of its tokens (${share(count("clip_fraction"))}).`);
  if (count("correction_fraction")) found.push(`The correction bounded ${count("correction_fraction")} of its tokens (${share(count("correction_fraction"))}).`);
  if (row.finish === "length") found.push("It was cut at max_tokens.");
  const age = row.step - 1 - row.version;
  if (age > 0 && row.version >= 0) found.push(`Its oldest token was written ${age} version${age > 1 ? "s" : ""} before the weights that trained it.`);
  return found;
}
