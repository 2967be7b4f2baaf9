// The list of runs, the views, and what the address says of both.
import { PALETTE, el, fill, number, visible } from "./parts.js";
import { REPORT, ask } from "./data.js";
import { overview } from "./overview.js";
import { time } from "./time.js";
import { rollouts } from "./rollouts.js";
import { rollout } from "./rollout.js";
import { heldOut } from "./held_out.js";

const EVERY = 2000; // milliseconds between two looks at the files
const VIEWS = { overview: ["Overview", overview], time: ["Time", time], rollouts: ["Rollouts", rollouts], held_out: ["Held-out", heldOut] };
const main = document.getElementById("main"), aside = document.getElementById("runs"), tabs = document.getElementById("tabs"), now = document.getElementById("now");
const loading = el("p", { className: "quiet", id: "loading" }, "Loading …");
let runs = [], view = null, key = "";

const search = el("input", { id: "search", type: "search", placeholder: "search runs", hidden: true, oninput: () => list() }), listed = el("div");
aside.append(search, listed);

function address() {
  return new URLSearchParams(location.hash.slice(1));
}

function go(changes) {
  const words = address();
  for (const [name, value] of Object.entries(changes)) value === null ? words.delete(name) : words.set(name, value);
  location.hash = words;
}

const context = {
  run: () => (runs.some((one) => one.run === address().get("run")) ? address().get("run") : newest()),
  row: () => Number(address().get("row")),
  chosen: () => [...new Set([context.run(), ...(address().get("with") ?? "").split("\n")])].filter((name) => runs.some((one) => one.run === name)),
  colour: (run) => PALETTE[Math.max(0, runs.findIndex((one) => one.run === run)) % PALETTE.length],
  open: (row) => go({ row }),
};

function newest() {
  return runs.reduce((best, one) => ((one.written ?? 0) > (best?.written ?? -1) ? one : best), null)?.run;
}

function list() {
  const words = address(), chosen = context.chosen();
  const toggle = (run) => (event) => {
    event.stopPropagation();
    const others = new Set(context.chosen().filter((name) => name !== context.run()));
    others.has(run) ? others.delete(run) : others.add(run);
    go({ with: others.size ? [...others].join("\n") : null });
  };
  search.hidden = runs.length < 9;
  fill(listed, [runs, chosen, context.run(), search.value], () => [runs.length > 1 && el("button", { id: "unfold", onclick: () => aside.classList.toggle("open") }, `all ${runs.length} runs`), ...runs.filter((one) => one.run === context.run() || one.run.includes(search.value)).map((one) => el("div", { className: "run", tabIndex: 0, "aria-current": one.run === context.run(), style: { "--colour": context.colour(one.run) }, onclick: () => { aside.classList.remove("open"); go({ run: one.run, row: null }); }, onkeydown: (event) => event.key === "Enter" && go({ run: one.run, row: null }) },
    el("input", { type: "checkbox", checked: chosen.includes(one.run), disabled: one.run === context.run(), title: "show beside the chosen one", onclick: toggle(one.run) }), el("b", {}, visible(one.name)),
    el("small", { className: ["damaged", "failed"].includes(one.state) ? "bad" : "" }, one.error ? visible(one.error) : `${visible(one.ending || one.state)}, step ${number(one.step)}${!one.steps ? "" : one.state === "finished" && one.step < one.steps ? `, before ${one.steps}` : `/${one.steps}`}${one.reward === null || one.reward === undefined ? "" : `, reward ${number(one.reward, 3)}`}`)))]);
  const current = VIEWS[words.get("view")] ? words.get("view") : "overview";
  fill(tabs, location.hash, () => Object.entries(VIEWS).map(([name, [text]]) => el("a", { href: `#${new URLSearchParams({ ...Object.fromEntries(words), view: name })}`, "aria-current": name === current, onclick: (event) => { event.preventDefault(); go({ view: name, row: null }); } }, text)));
  return current;
}

async function refresh() {
  clearTimeout(refresh.timer);
  if (runs.length) list(); // a click is seen at once, what it asks for follows
  refresh.again = refresh.busy; // one at a time: what comes meanwhile is done afterwards
  if (refresh.busy) return;
  refresh.busy = true;
  try {
    runs = await ask("runs");
    const current = list(), run = context.run();
    if (run === undefined) {
      main.replaceChildren(el("p", { className: "quiet" }, "There are no runs in this folder so far."));
    } else {
      const make = current === "rollouts" && address().has("row") ? rollout : VIEWS[current][1], wanted = `${make.name} ${current === "overview" ? "" : run} ${address().get("row") ?? ""}`;
      if (wanted !== key) {
        key = wanted;
        view = make(context);
        main.replaceChildren(loading, view.node);
      }
      await view.update();
      loading.remove();
      main.querySelector(":scope > .alert.error")?.remove();
      const own = runs.find((one) => one.run === run);
      now.textContent = `${visible(own.name)}: ${visible(own.ending || own.state)}${own.state === "running" ? ", shown as it runs" : ""}`;
      document.title = `${own.name} – forge`;
    }
  } catch (error) {
    main.querySelector(":scope > .alert.error")?.remove();
    loading.remove();
    main.prepend(el("div", { className: "alert error" }, error instanceof TypeError && /fetch/.test(error.message) ? "The server does not answer: is forge watch running?" : visible(error.message)));
    console.warn(error);
  }
  refresh.busy = false;
  if (refresh.again) refresh();
  else if (!REPORT) refresh.timer = setTimeout(refresh, EVERY);
}

addEventListener("hashchange", refresh);
refresh();
