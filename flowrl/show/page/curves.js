// Curves of what was logged, of several runs at once.
import { ask } from "./ask.js";
import { debounce, fill, h } from "./dom.js";
import { number, seconds } from "./words.js";
import { colour, mainProgram, page, remember } from "./page.js";

export const title = "Curves";

const MEANINGS = {
  reward: "The mean reward of a step.",
  loss: "The loss of an optimizer step, its mean over the steps of the call.",
  entropy: "How undecided the policy is, in nats. Near 0 it always says the same.",
  rollout_kl: "How far the policy that is trained is from the one that sampled.",
  kl: "How far the policy is from the reference.",
  ref_kl: "How far the policy that sampled is from the reference.",
  approx_kl: "How far this update has moved the policy, by its own estimate.",
  ratio: "New probability of a token by its old one, the mean.",
  ratio_max: "The largest ratio of a token.",
  ess: "The effective sample size as a share: 1 where all ratios are equal.",
  clip_fraction: "The share of tokens that the clip holds back.",
  clip_low: "The share of tokens that are held back with a ratio below 1.",
  clip_high: "The share of tokens that are held back with a ratio of 1 and more.",
  grad_norm: "The norm of the gradient before it is clipped.",
  lr: "The learning rate.",
  truncated: "The share of rows that reached the limit of tokens.",
  silent_groups: "The share of prompts whose rows were all rewarded alike: they teach nothing.",
  repetition: "The share of sequences of four tokens that came before in the same response.",
  response_length: "The mean number of tokens of a response.",
  tokens_per_second: "Response tokens by seconds, of as many steps as may be under way at once.",
  seconds: "From the commit of the step before to that of this one.",
  gap_mean: "How far the log-probabilities of engine and trainer are apart, the mean.",
  gap_max: "How far they are apart at most.",
};
const GROUPS = [
  ["What is learnt", /reward|accuracy|exact_match|score|success|win|return/],
  ["Policy", /^(entropy|rollout_kl|ref_kl|kl|approx_kl|ratio|ratio_max|ess|clip_.*|values?|explained.*)$|kl$/],
  ["Optimizer", /^(loss|grad_norm|lr|weight|steps)$|loss$/],
  ["Responses", /^(response_length|truncated|silent_groups|repetition|tokens|rows|turns)$/],
  ["Engine and trainer", /gap_/],
  ["Speed", /^(seconds|tokens_per_second)$/],
];
const AXES = { step: "Steps", clock: "Time" };

export function draw(place) {
  const programs = h("select", { "aria-label": "Program", on: { change: (e) => changeProgram(e.target.value) } });
  const find = h("input", { type: "search", placeholder: "Find a metric", "aria-label": "Find a metric", value: page.words.metric ?? "",
    on: { input: debounce(() => { remember({ metric: find.value }); layOut(); }, 150) } });
  const axis = h("select", { "aria-label": "Horizontal axis", on: { change: () => { remember({ axis: axis.value }); redraw(); } } },
    Object.entries(AXES).map(([value, text]) => h("option", { value, selected: page.words.axis === value }, text)));
  const smooth = h("input", { type: "range", min: 0, max: 50, step: 1, value: page.words.smooth ?? 0, "aria-label": "Smoothing",
    on: { input: () => { remember({ smooth: smooth.value }); redraw(); } } });
  const log = h("input", { type: "checkbox", checked: page.words.log === "1", on: { change: () => { remember({ log: log.checked ? "1" : "" }); redraw(); } } });
  const sections = h("div", { class: "sections" });
  fill(place, h("div", { class: "bar" }, programs, find, h("label", {}, "Smooth ", smooth), h("label", {}, "Over ", axis),
    h("label", {}, log, " Logarithmic")), sections);

  let names = new Map(); // of each overlaid run: program -> names
  let cards = []; // { name, chart, box, data }
  let alive = true, asking = false, again = false;
  const sees = new IntersectionObserver((entries) => {
    for (const entry of entries) entry.target.seen = entry.isIntersecting;
    load();
  }, { rootMargin: "300px" });

  function changeProgram(name) {
    page.program = name;
    remember({ program: name });
    layOut();
  }

  async function learnNames() {
    const ids = page.runs.filter((one) => page.overlaid.has(one.id)).map((one) => one.id);
    const answers = await Promise.all(ids.map((run) => ask("names", { run })));
    names = new Map(ids.map((id, place) => [id, answers[place].programs]));
    const most = new Map();
    for (const programs of names.values()) for (const one of programs) most.set(one.program, Math.max(most.get(one.program) ?? 0, one.lines));
    const own = names.get(page.chosen) ?? [];
    if (!most.has(page.program)) page.program = mainProgram([...most.keys()]) ?? own.reduce((a, b) => (b.lines > a.lines ? b : a), { program: [...most.keys()][0] ?? "", lines: -1 }).program;
    if (programs.dataset.listed !== JSON.stringify([...most.keys()])) {
      programs.dataset.listed = JSON.stringify([...most.keys()]);
      fill(programs, [...most.keys()].map((name) => h("option", { value: name }, name)));
    }
    programs.value = page.program;
    programs.hidden = most.size < 2;
  }

  function shownNames() {
    const all = new Set();
    for (const programs of names.values()) for (const one of programs) if (one.program === page.program) one.names.forEach((name) => all.add(name));
    const wanted = find.value.trim().toLowerCase();
    return [...all].filter((name) => name.toLowerCase().includes(wanted));
  }

  function layOut() {
    cards.forEach((card) => { sees.unobserve(card.box); card.chart?.destroy(); });
    const left = new Set(shownNames()), groups = [];
    for (const [heading, pattern] of GROUPS) {
      const inside = [...left].filter((name) => pattern.test(name.split("/").pop()) || pattern.test(name.split("/")[0]));
      inside.forEach((name) => left.delete(name));
      groups.push([heading, inside.sort((a, b) => rank(a, pattern) - rank(b, pattern))]);
    }
    groups.push(["Other", [...left]]);
    cards = [];
    fill(sections, groups.filter(([, inside]) => inside.length).map(([heading, inside]) => h("section", {}, h("h2", {}, heading),
      h("div", { class: "charts" }, inside.map((name) => makeCard(name))))));
    if (!cards.length) fill(sections, h("p", { class: "empty" }, find.value ? "No metric has this name." : "Nothing has been logged yet. The first step will appear here."));
    cards.forEach((card) => sees.observe(card.box));
  }

  function makeCard(name) {
    const value = h("span", { class: "value" });
    const plot = h("div", { class: "plot" });
    const box = h("figure", { class: "chart", "data-metric": name },
      h("figcaption", {}, h("bdi", { title: MEANINGS[name.split("/").pop()] ?? null }, name), value), plot);
    box.addEventListener("dblclick", () => { box.classList.toggle("wide"); paint(card); });
    const card = { name, box, plot, value, chart: null, data: null };
    cards.push(card);
    return box;
  }

  async function load(all = false) {
    if (asking) { again = again || all; return; }
    asking = true;
    try {
      for (;;) {
        const needed = cards.filter((card) => card.box.seen && (all || card.data === null)).slice(0, all ? 40 : 12);
        if (!needed.length || !alive) break;
        const wanted = needed.map((card) => card.name), program = page.program;
        const answers = await Promise.all([...names.keys()].map(async (run) => [run, (await ask("curves", { run, program, name: wanted })).curves]));
        for (const card of needed) {
          card.data = answers.flatMap(([run, curves]) => (curves[card.name] ?? []).map((curve) => ({ run, ...curve })));
          if (alive && program === page.program) paint(card);
        }
        if (all) break;
      }
    } finally {
      asking = false;
    }
    if (again && alive) { again = false; await load(true); }
  }

  function redraw() {
    cards.forEach((card) => card.data && paint(card));
  }

  function paint(card) {
    if (!card.data) return;
    const curves = card.data.filter((curve) => curve.mean.length);
    const over = axis.value, many = curves.length > 6;
    const above = (values) => (log.checked ? values.map((value) => (value > 0 ? value : null)) : values);
    const tables = curves.map((curve) => [curve[over], above(curve.mean), above(smoothed(curve.mean, Number(smooth.value)))]);
    const joined = tables.length ? uPlot.join(tables) : [[], []];
    const look = getComputedStyle(document.documentElement);
    const faint = look.getPropertyValue("--faint"), rule = look.getPropertyValue("--rule");
    const smoothing = Number(smooth.value) > 0;
    const series = curves.flatMap((curve, place) => {
      const ink = names.size > 1 ? colour(curve.run) : colourOf(place);
      const points = { show: curve.mean.length < 2 };
      return [
        { stroke: ink, width: 1.4, alpha: smoothing ? 0.22 : 1, spanGaps: true, points },
        { stroke: ink, width: 2, show: smoothing, spanGaps: true, points },
      ];
    });
    const told = (at) => {
      const parts = curves.map((curve, place) => [joined[2 * place + 1 + (smoothing ? 1 : 0)]?.[at], names.size > 1 ? colour(curve.run) : colourOf(place)])
        .filter(([value]) => value !== null && value !== undefined);
      if (at === null || at === undefined || !parts.length) {
        fill(card.value, curves.slice(0, 4).map((curve, place) => h("b", { vars: { color: names.size > 1 ? colour(curve.run) : colourOf(place) } }, number(curve.last))));
      } else {
        const where = over === "step" ? `step ${number(joined[0][at])}` : seconds(joined[0][at]);
        fill(card.value, h("small", {}, where), parts.slice(0, 5).map(([value, ink]) => h("b", { vars: { color: ink } }, number(value))));
      }
    };
    const options = {
      width: Math.max(200, card.plot.clientWidth), height: card.box.classList.contains("wide") ? 420 : 170,
      series: [{}, ...series], legend: { show: false }, padding: [8, 8, 0, 0],
      cursor: { sync: { key: "curves" }, y: false, points: { show: !many }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: log.checked ? { distr: 3 } : { range: spread } },
      axes: [
        { stroke: faint, grid: { show: false }, ticks: { stroke: rule, size: 4 }, size: 26, font: "11.5px system-ui, sans-serif",
          values: (_, ticks) => ticks.map((tick) => (over === "clock" ? seconds(tick) : Number.isInteger(tick) ? number(tick) : "")) },
        { stroke: faint, grid: { stroke: rule, width: 0.6 }, ticks: { show: false }, size: 52, font: "11.5px system-ui, sans-serif",
          values: (_, ticks, axis_, space, apart) => ticks.map((tick) => (tick === null ? "" : tickText(tick, log.checked ? 0 : apart))) },
      ],
      hooks: { setCursor: [(chart) => told(chart.cursor.idx)] },
    };
    const zoom = card.chart && card.over === over ? { ...card.chart.scales.x } : null;
    const whole = card.chart && zoom && zoom.min <= card.chart.data[0][0] && zoom.max >= card.chart.data[0].at(-1);
    card.chart?.destroy();
    fill(card.plot);
    card.over = over;
    card.chart = new uPlot(options, joined, card.plot);
    if (zoom && !whole && zoom.min !== null) card.chart.setScale("x", zoom);
    told(null);
    card.box.dataset.points = curves.reduce((sum, curve) => sum + curve.mean.length, 0);
  }

  const resized = debounce(() => redraw(), 120);
  addEventListener("resize", resized);
  const start = async () => {
    await learnNames();
    if (alive) layOut();
  };
  start();
  return {
    async update(anew) {
      const before = JSON.stringify([page.program, [...names].map(([id, programs]) => [id, programs.map((one) => [one.program, one.names])])]);
      await learnNames();
      if (!alive) return;
      const after = JSON.stringify([page.program, [...names].map(([id, programs]) => [id, programs.map((one) => [one.program, one.names])])]);
      if (anew || before !== after) layOut();
      else await load(true);
    },
    leave() {
      alive = false;
      sees.disconnect();
      removeEventListener("resize", resized);
      cards.forEach((card) => card.chart?.destroy());
    },
  };
}

const INKS = ["#2f6fd0", "#d9822b", "#2e9e6b", "#8e5bd0"];
const colourOf = (place) => INKS[place % INKS.length];

function rank(name, pattern) { // the names that a pattern lists come in its order
  const own = name.split("/").pop();
  const at = pattern.source.indexOf(own);
  return (name.includes("/") ? 1000 : 0) + (at < 0 ? 500 : at);
}

function spread(chart, low, high) {
  if (low === null || high === null) return [0, 1];
  if (high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high))) return [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const room = (high - low) * 0.06;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

function tickText(tick, apart) { // as many places as tell it from the next one
  const places = apart ? Math.max(0, -Math.floor(Math.log10(apart) + 1e-9)) : 9;
  return places > 5 || Math.abs(tick) >= 1e6 ? number(Number(tick.toPrecision(3))).replace(/\.?0*e/, "e") : tick.toFixed(places);
}

function smoothed(values, width) {
  if (!width) return values;
  const keep = 1 - 1 / (1 + width);
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = keep * mean + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return mean / weight;
  });
}
