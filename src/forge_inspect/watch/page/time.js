// What each process did when, on one axis with steps, restarts and the share of the asynchrony bound.
import { PALETTE, css, el, fill, number, percent, seconds, table, visible } from "./parts.js";
import { ask, eventsOf, rowsOf } from "./data.js";

const FURTHER = ["#5b3a1e", "#1a2f6b", "#9bc53d", "#f29ac0", "#0b4f3a", "#7a1f4f", "#8fd0f5", "#d9b8a6"]; // colours of phases, after the palette
const ROW = 20, LEFT = 130, AGE = 46, TOP = 22;

export function time(context) {
  const canvas = el("canvas", { id: "lanes", tabIndex: 0 }), keys = el("div", { className: "keys" }), said = el("div"), processes = el("div"), tip = el("div", { className: "tip", hidden: true });
  const covered = el("span", { className: "quiet", id: "covered" }), colours = new Map(); // by phase, those that take longest first
  const tint = (name) => (waits(name) ? css("--line") : colours.get(name));
  const buttons = [["whole run", 0], ["last 5 steps", 5], ["last 30 steps", 30]].map(([text, steps]) => el("button", { value: String(steps), onclick: () => { zoom(steps); draw(); } }, text));
  const node = el("div", {}, said, el("div", { className: "controls" }, buttons, covered, el("span", { className: "quiet" }, "Wheel zooms, dragging moves.")), canvas, keys, el("h2", {}, "Processes"), processes, tip);
  let lanes = [], marks = [], from = 0, to = 1, window_ = null, bound = 0, boxes = [], first = true;

  const recent = (steps) => { const own = marks.filter((mark) => mark.step); return [own.at(-1 - steps)?.at ?? from, to]; };
  const span = () => window_ ?? [from, to];

  function zoom(steps) {
    window_ = steps ? recent(steps) : null;
    press(steps);
  }

  // The button of the range that is shown; none after the user has moved it.
  function press(steps) {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.value === String(steps)));
  }

  async function update() {
    const run = context.run(), [events, columns, about] = await Promise.all([eventsOf(run), rowsOf(run), ask("run", { run })]);
    bound = about.settings["async.max_policy_age"] ?? 0;
    ({ lanes, marks, from, to } = read(events));
    if (first) zoom(marks.length > 40 ? 30 : 0);
    first = first && !marks.length;
    const words = sentences(columns, lanes, bound);
    fill(said, words, () => words.map((text) => el("p", {}, text)));
    const longest = Math.max(0, ...lanes.flatMap((lane) => lane.phases.map(([, sum]) => sum)));
    fill(processes, events.length, () => [table(["process", "busy", "waiting", "cores", "memory (MB)", "pids", "longest phases"], lanes.map((lane) => [visible(lane.name), percent(lane.busy), percent(lane.waits),
      number(lane.cores, 3), number(lane.memory, 5), visible(lane.pids.join(", ")), el("span", { className: "line" }, lane.phases.slice(0, 4).map(([name, sum]) => `${phaseName(name)} ${seconds(sum, longest)}`).join(", "))]), [1, 2, 3, 4])]);
    const sums = new Map();
    for (const [name, sum] of lanes.flatMap((lane) => lane.phases)) sums.set(name, (sums.get(name) ?? 0) + sum);
    const names = [...sums].sort((a, b) => b[1] - a[1]).map(([name]) => name);
    names.filter((name) => !waits(name) && !colours.has(name)).forEach((name) => colours.set(name, phaseColour(colours.size)));
    keys.replaceChildren(...names.map((name) => el("span", {}, el("i", { style: { background: tint(name) } }), phaseName(name))), ...(marks.some((mark) => mark.step === null) ? [el("span", {}, el("i", { style: { background: css("--bad") } }), "restart")] : []));
    draw();
  }

  function draw() {
    const width = canvas.clientWidth, rows = lanes.reduce((sum, lane) => sum + lane.depth, 0), height = TOP + rows * ROW + lanes.length * 6 + AGE + 8;
    const scale = devicePixelRatio || 1, pen = canvas.getContext("2d");
    canvas.style.height = `${height}px`;
    canvas.width = width * scale;
    canvas.height = height * scale;
    pen.scale(scale, scale);
    const [a, b] = span(), steps = marks.filter((mark) => mark.step && mark.at > a && mark.at <= b).map((mark) => mark.step), last = marks.findLast((mark) => mark.step)?.step;
    covered.textContent = last ? `${steps.length ? `Steps ${steps[0]} to ${steps.at(-1)}` : "No end of a step"} of ${last}, ${seconds(Math.max(0, a - from))} to ${seconds(b - from)}.` : "";
    const x = (at) => LEFT + ((at - a) / (b - a || 1)) * (width - LEFT - 8);
    pen.font = "11px system-ui";
    pen.textBaseline = "middle";
    boxes = [];
    pen.fillStyle = css("--quiet");
    let free = 0;
    for (const tick of ticks(a - from, b - from)) {
      const at = x(tick + from), text = seconds(tick), wide = pen.measureText(text).width;
      pen.fillRect(at, TOP - 6, 1, 5);
      if (at < free || at + wide > width) continue;
      pen.fillText(text, at + 3, 10);
      free = at + wide + 12;
    }
    let y = TOP;
    for (const lane of lanes) {
      pen.fillStyle = css("--text");
      pen.fillText(visible(lane.name).slice(0, 19), 8, y + (lane.depth * ROW) / 2);
      pen.fillStyle = css("--soft");
      pen.fillRect(LEFT, y, width - LEFT - 8, lane.depth * ROW);
      if (!lane.spans.length) { pen.fillStyle = css("--quiet"); pen.fillText("no phases are recorded here", LEFT + 6, y + ROW / 2); }
      for (const one of lane.spans) {
        if (one.at + one.length < a || one.at > b) continue;
        const left = Math.max(LEFT, x(one.at)), wide = Math.max(0.7, Math.min(width - 8, x(one.at + one.length)) - left);
        pen.fillStyle = tint(one.name);
        pen.fillRect(left, y + one.level * ROW + 2, wide, ROW - 4);
        boxes.push({ left, wide, top: y + one.level * ROW, one, lane });
        if (wide > 60) { pen.fillStyle = "#fff"; pen.fillText(phaseName(one.name).slice(0, wide / 7), left + 5, y + one.level * ROW + ROW / 2); }
      }
      y += lane.depth * ROW + 6;
    }
    pen.fillStyle = css("--quiet");
    pen.fillText(bound ? `policy age / ${bound}` : "policy age", 8, y + AGE / 2);
    const inside = marks.filter((mark) => mark.at >= a && mark.at <= b), most = Math.max(bound, 1, ...marks.map((mark) => mark.age ?? 0));
    inside.forEach((mark, i) => {
      if (mark.step === null) { pen.fillStyle = css("--bad"); pen.fillRect(x(mark.at) - 1, TOP, 2, y - TOP + AGE); return; }
      pen.fillStyle = css("--line");
      if (inside.length < 80) pen.fillRect(x(mark.at), TOP, 1, y - TOP);
      const before = marks[marks.indexOf(mark) - 1]?.at ?? from, left = Math.max(LEFT, x(before));
      if (mark.age !== null) {
        const tall = (mark.age / most) * (AGE - 6);
        pen.fillStyle = bound && mark.age >= bound ? css("--warn") : css("--accent");
        pen.globalAlpha = 0.55;
        pen.fillRect(left, y + AGE - tall, Math.max(1, x(mark.at) - left - 1), Math.max(1, tall));
        pen.globalAlpha = 1;
      }
      boxes.push({ left, wide: Math.max(1, x(mark.at) - left), top: y, tall: AGE, mark });
    });
  }

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const [a, b] = span(), at = a + ((event.offsetX - LEFT) / (canvas.clientWidth - LEFT - 8)) * (b - a), by = event.deltaY > 0 ? 1.25 : 0.8;
    press(null);
    window_ = [Math.max(from, at - (at - a) * by), Math.min(to, at + (b - at) * by)];
    draw();
  }, { passive: false });
  canvas.addEventListener("pointermove", (event) => {
    if (event.buttons) {
      const [a, b] = span(), by = (-event.movementX / (canvas.clientWidth - LEFT - 8)) * (b - a);
      if (a + by >= from && b + by <= to) { window_ = [a + by, b + by]; press(null); draw(); }
    }
    const hit = boxes.findLast((box) => event.offsetX >= box.left && event.offsetX <= box.left + box.wide && event.offsetY >= box.top && event.offsetY < box.top + (box.tall ?? ROW));
    tip.hidden = !hit;
    if (!hit) return;
    tip.replaceChildren(...(hit.mark ? [el("b", {}, `step ${hit.mark.step}`), el("div", {}, `policy age ${number(hit.mark.age)}${bound ? ` of ${bound}` : ""}`), el("div", {}, hit.mark.reward === null ? "" : `reward ${number(hit.mark.reward)}`)]
      : [el("b", {}, phaseName(hit.one.name)), el("div", {}, `${seconds(hit.one.length)} in ${visible(hit.lane.name)}, pid ${hit.one.pid}`), el("div", { className: "quiet" }, `at ${seconds(hit.one.at - from)}`)]));
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 240)}px`;
    tip.style.top = `${event.clientY + 14}px`;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  addEventListener("resize", () => canvas.isConnected && draw());
  return { node, update };
}

// What the phases are called for readers; another one keeps its name.
const PHASES = { wait_for_batch: "waits for rollouts", rollout_metrics: "counts rollouts", log_rollouts: "records rollouts", credit: "computes advantages", pack: "packs tokens", log: "writes metrics", drain_metrics: "collects metrics", train: "trains", generate: "samples",
  checkpoint: "writes a checkpoint", push_weights: "publishes weights", update_weights: "takes new weights", release: "frees its memory", evaluate: "evaluates", reference: "reference model", logprobs: "log-probabilities", predict: "values of the critic", on_step: "your on_step" };
const phaseName = (name) => visible(PHASES[name] ?? name);

// A colour that no other phase has.
function phaseColour(i) {
  return [...PALETTE, ...FURTHER][i] ?? `hsl(${(i * 137.5) % 360} 55% ${35 + ((i * 7) % 30)}%)`;
}

function waits(name) {
  return name.startsWith("wait");
}

function ticks(a, b) {
  const step = [0.001, 0.01, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 36000, 86400].find((one) => (b - a) / one <= 9) ?? (b - a) / 8;
  return Array.from({ length: Math.max(0, Math.floor(b / step) - Math.ceil(a / step) + 1) }, (_, i) => (Math.ceil(a / step) + i) * step);
}

function read(events) {
  const names = new Map(), byName = new Map(), marks = [];
  for (const event of events) if (event.ph === "M" && event.args) names.set(event.pid, String(event.args.name));
  for (const event of events) {
    const at = event.ts / 1e6, name = names.get(event.pid) ?? `process ${event.pid}`;
    if (event.ph === "i") marks.push({ at, step: event.args?.step ?? null, age: event.args?.["policy_age/max"] ?? event.args?.policy_age ?? null, reward: event.args?.reward ?? null });
    if (event.ph !== "X" && event.ph !== "C") continue;
    if (!byName.has(name)) byName.set(name, { name, spans: [], uses: [], pids: new Set() });
    const lane = byName.get(name);
    lane.pids.add(event.pid);
    if (event.ph === "X") lane.spans.push({ name: String(event.name), at, length: event.dur / 1e6, pid: event.pid });
    else lane.uses.push(event);
  }
  marks.sort((a, b) => a.at - b.at);
  const all = [...byName.values()].flatMap((lane) => lane.spans);
  const from = all.reduce((low, one) => Math.min(low, one.at), marks[0]?.at ?? 0), to = all.reduce((high, one) => Math.max(high, one.at + one.length), marks.at(-1)?.at ?? 1);
  const lanes = [...byName.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
  for (const lane of lanes) {
    lane.spans.sort((a, b) => a.at - b.at || b.length - a.length);
    const ends = [];
    for (const one of lane.spans) {
      one.level = ends.findIndex((end) => end <= one.at);
      if (one.level < 0) one.level = Math.min(ends.length, 2);
      ends[one.level] = Math.max(ends[one.level] ?? 0, one.at + one.length);
    }
    lane.depth = Math.max(1, ends.length);
    const sums = new Map();
    for (const one of lane.spans) sums.set(one.name, (sums.get(one.name) ?? 0) + one.length);
    lane.phases = [...sums].sort((a, b) => b[1] - a[1]);
    lane.busy = union(lane.spans.filter((one) => !waits(one.name))) / (to - from || 1);
    lane.waits = union(lane.spans.filter((one) => waits(one.name))) / (to - from || 1);
    const cores = lane.uses.filter((use) => use.name === "cores").map((use) => use.args.cores), memory = lane.uses.filter((use) => use.name === "memory_mb").map((use) => use.args.MB);
    lane.cores = cores.length ? cores.reduce((a, b) => a + b, 0) / cores.length : null;
    lane.memory = memory.length ? memory.reduce((a, b) => Math.max(a, b), 0) : null;
    lane.pids = [...lane.pids];
  }
  return { lanes, marks, from, to };
}

function union(spans) {
  let sum = 0, end = -Infinity;
  for (const one of spans) {
    sum += Math.max(0, one.at + one.length - Math.max(end, one.at));
    end = Math.max(end, one.at + one.length);
  }
  return sum;
}

function sentences(columns, lanes, bound) {
  const sum = (name) => (columns[name] ?? []).reduce((total, value) => total + (value ?? 0), 0), all = sum("seconds/step");
  if (!all) return ["No step was logged so far: phases are written as steps end."];
  const share = (name) => sum(name) / all, generators = lanes.filter((lane) => lane.name.startsWith("generator"));
  const found = [`Training waited ${percent(share("seconds/wait_for_batch"))} of the time for rollouts, and trained ${percent(share("seconds/train"))} of it.`];
  if (generators.length) found[0] += ` Generators were busy ${percent(generators.reduce((total, lane) => total + lane.busy, 0) / generators.length)} of it.`;
  const ages = (columns["policy_age/max"] ?? []).filter((value) => value !== null);
  if (ages.length && bound) found.push(`Rollouts were at the bound of the asynchrony (max_policy_age ${bound}) in ${percent(ages.filter((age) => age >= bound).length / ages.length)} of the steps; on average they used ${percent(ages.reduce((a, b) => a + b, 0) / ages.length / bound)} of it.`);
  if (ages.length && !bound) found.push("Lock-step: rollouts and training take turns (max_policy_age 0).");
  const restarts = Object.keys(columns).filter((name) => name.startsWith("restarts/")).map((name) => `${name.slice(9)} ${sum(name)}`);
  if (restarts.length) found.push(`Lost and replaced: ${visible(restarts.join(", "))}.`);
  return found;
}
