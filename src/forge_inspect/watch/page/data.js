// Where the data comes from: the server, or in a report the page itself.
const inlined = document.getElementById("data");
export const REPORT = inlined ? JSON.parse(inlined.textContent) : null;

export async function ask(path, query = {}) {
  if (REPORT) return answer(path, query);
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== "" && one !== null && one !== undefined) words.append(name, one);
  }
  const response = await fetch(`api/${path}?${words}`);
  const found = await response.json();
  if (!response.ok) throw new Error(found.error ?? response.statusText);
  return found;
}

function answer(path, query) {
  const { name, about, curves, lanes, rollouts, held_out } = REPORT;
  if (path === "runs") return [{ run: name, name, ...about }];
  if (path === "run") return about;
  if (path === "rows") return query.after ? { ...curves, columns: {} } : curves;
  if (path === "trace") return query.after ? { ...lanes, found: [] } : lanes;
  if (path === "differences") return {};
  if (path === "held_out") return answers(held_out, query);
  if (path === "rollout") return rollouts.find((row) => row.row === Number(query.row));
  if (path === "group") {
    const own = rollouts.find((row) => row.row === Number(query.row));
    return rollouts.filter((row) => row.step === own.step && row.group === own.group);
  }
  const numbers = ["step", "group", "reward", "advantage", "version", "length"];
  const text = (query.text ?? "").toLowerCase();
  const found = rollouts.filter((row) =>
    numbers.every((n) => (query[`${n}_min`] ? row[n] >= Number(query[`${n}_min`]) : true) && (query[`${n}_max`] ? row[n] <= Number(query[`${n}_max`]) : true))
    && (!query.reason || (query.reason === "trained" ? !row.dropped : query.reason === "dropped" ? row.dropped : row.dropped === query.reason))
    && (!text || ["prompt", "response", "target"].some((n) => (row[n] ?? "").toLowerCase().includes(text))));
  const sort = query.sort || "step";
  found.sort((a, b) => ((a[sort] ?? -Infinity) - (b[sort] ?? -Infinity)) * (query.down === "1" ? -1 : 1));
  const rewards = found.map((row) => row.reward).filter((value) => value !== null);
  return { total: found.length, all: rollouts.length, histogram: histogram(rewards), rows: found.slice(50 * (query.page ?? 0)).slice(0, 50),
    reasons: [...new Set(rollouts.map((row) => row.dropped).filter(Boolean))].sort() };
}

// Those of the first and of the last evaluation are in a report.
function answers(pages, query) {
  const sets = [...new Set(pages.map((page) => page.set))], set = sets.includes(query.set) ? query.set : sets[0];
  const own = pages.filter((page) => page.set === set), steps = own.map((page) => page.step);
  const page = own.find((one) => String(one.step) === query.step) ?? own.at(-1);
  if (!page) return { sets, set, steps, step: null, total: 0, all: 0, rows: [] };
  const wanted = { right: true, wrong: false, unknown: null };
  const rows = page.rows.filter((row) => !(query.verdict in wanted) || row.correct === wanted[query.verdict]);
  return { sets, set, steps, step: page.step, total: rows.length, all: page.rows.length, rows: rows.slice(50 * (query.page ?? 0)).slice(0, 50) };
}

function histogram(values) {
  if (!values.length) return null;
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const edges = Array.from({ length: 21 }, (_, i) => low + ((high - low) * i) / 20);
  const counts = Array(20).fill(0);
  for (const value of values) counts[Math.min(19, Math.floor(((value - low) / (high - low)) * 20))] += 1;
  return { counts, edges };
}

// Columns of metrics.jsonl and events of the trace, by run, as far as they were fetched.
const rows = new Map();
const events = new Map();

export async function rowsOf(run) {
  const have = rows.get(run) ?? { version: null, rows: 0, columns: {} };
  const more = await ask("rows", { run, after: have.rows || "" });
  if (have.rows && more.version !== have.version) {
    rows.delete(run);
    return rowsOf(run);
  }
  const known = have.columns.step?.length ?? 0, added = Math.max(0, ...Object.values(more.columns).map((column) => column.length));
  for (const name of new Set([...Object.keys(have.columns), ...Object.keys(more.columns)])) {
    const before = have.columns[name] ?? Array(known).fill(null);
    have.columns[name] = before.concat(more.columns[name] ?? Array(added).fill(null));
  }
  Object.assign(have, { version: more.version, rows: more.rows });
  rows.set(run, have);
  return have.columns;
}

export async function eventsOf(run) {
  const have = events.get(run) ?? { version: null, events: 0, found: [] };
  const more = await ask("trace", { run, after: have.events || "" });
  if (have.events && more.version !== have.version) {
    events.delete(run);
    return eventsOf(run);
  }
  events.set(run, { version: more.version, events: more.events, found: have.found.concat(more.found) });
  return events.get(run).found;
}
