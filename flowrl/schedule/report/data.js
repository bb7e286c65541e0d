// What the page knows: where lanes and rows are, what each step covers, words for times and bytes.

const { bars, nodes, pools, reasons, makespan } = JSON.parse(document.getElementById("record").textContent);
const all = (selector) => [...document.querySelectorAll(selector)];
const [view, canvas, overview, names, card, seen] =
  ["view", "canvas", "overview", "names", "card", "seen"].map((id) => document.getElementById(id));
const count = bars.start.length;
const total = Math.max(makespan, bars.end.reduce((most, end) => Math.max(most, end), 0)) || 1;
const slack = total * 1e-9;
const clamp = (x, least, most) => Math.min(Math.max(x, least), Math.max(least, most));
const AXIS = 44, ROW = 24, GAP = 7, MEMORY = 54, LEAST = 62;

// -- what is where ----------------------------------------------------------------------------------------------
const tight = pools.length > 60;
let bottom = AXIS;
const lanes = pools.map((pool) => {
  const count = Math.max(pool.rows, 1);
  const height = clamp(Math.floor(132 / count), 3, tight ? 18 : ROW);
  const drawn = count * (height + 2);
  const memory = pool.memory.length ? MEMORY : 0;
  const whole = Math.max(drawn + memory + 2 * GAP, tight ? 26 : LEAST);
  const lane = { pool, top: bottom, whole, row: height, first: bottom + (memory ? GAP : (whole - drawn) / 2), memory };
  lane.rows = Array.from({ length: count }, () => []);
  lane.items = [];
  bottom += whole;
  return lane;
});
const steps = new Map(); // number: first start, last end
const titled = new Map(); // title: bars by their end
const before = new Float64Array(count); // seconds that the pool did nothing before a bar
const pieces = nodes.map(() => 1);
const title = (node) => nodes[node].id.split("#")[0];
let shortest = Infinity;
{
  const busyUntil = pools.map(() => 0);
  for (let i = 0; i < count; i++) {
    const lane = bars.lane[i], step = bars.step[i], start = bars.start[i], end = bars.end[i];
    lanes[lane].rows[bars.row[i]].push(i);
    lanes[lane].items.push(i);
    before[i] = Math.max(0, start - busyUntil[lane]);
    busyUntil[lane] = Math.max(busyUntil[lane], end);
    pieces[bars.node[i]] = Math.max(pieces[bars.node[i]], bars.piece[i] + 1);
    if (end > start) shortest = Math.min(shortest, end - start);
    const name = title(bars.node[i]);
    if (!titled.has(name)) titled.set(name, []);
    titled.get(name).push(i);
    if (step < 0) continue;
    const known = steps.get(step);
    if (!known) steps.set(step, { first: start, last: end });
    else known.last = Math.max(known.last, end);
  }
  for (const items of titled.values()) items.sort((a, b) => bars.end[a] - bars.end[b]);
}
const numbers = [...steps.keys()].sort((a, b) => a - b);
const narrowest = Math.min(total, Math.max(total * 1e-11, (Number.isFinite(shortest) ? shortest : total) * 2));

// -- words ------------------------------------------------------------------------------------------------------
const brief = (x) => String(Number(x.toPrecision(3)));

function duration(seconds) { // as in the tables
  const small = [[0.9995e-6, 1e9, "ns"], [0.9995e-3, 1e6, "µs"], [0.9995, 1e3, "ms"], [999.5, 1, "s"]];
  if (!(seconds > 0)) return "0 s";
  for (const [limit, factor, unit] of small) if (seconds < limit) return `${brief(seconds * factor)} ${unit}`;
  for (const [step, per, most, big, unit] of [[1, 60, 7200, "min", "s"], [60, 60, 2880, "h", "min"], [3600, 24, Infinity, "d", "h"]]) {
    const n = Math.round(seconds / step);
    if (n < most) return `${Math.floor(n / per)} ${big} ${n % per} ${unit}`;
  }
  return "";
}

function volume(bytes) {
  const [factor, unit] = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]].find(([f]) => bytes >= f * 0.9995) || [1, "B"];
  return `${brief(bytes / factor)} ${unit}`;
}

function unitOf(most, step) { // for points in time: what they are counted in
  if (most < 1e-3) return [1e-6, "µs"];
  if (most < 1) return [1e-3, "ms"];
  return most >= 36000 && step >= 90 ? [3600, "h"] : [1, "s"];
}

function moment(seconds, step, most = total) { // a point in time, with the digits that a step asks for
  const [unit, name] = unitOf(most, step);
  const decimals = clamp(Math.ceil(-Math.log10(step / unit) - 1e-9), 0, 9);
  const said = (seconds / unit).toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  return `${said.replaceAll(",", "\u202f")} ${name}`;
}

const exact = (seconds) => moment(seconds, Math.max(Math.min(shortest, total) / 1000, total * 1e-9)).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ");
const stepName = (step) => (step < 0 ? "outside of steps" : String(step));
