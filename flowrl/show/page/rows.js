// Trajectories: a list that is searched, filtered and sorted, and one row or one prompt's rows beside it.
import { ask, wholeText } from "./ask.js";
import { fill, h } from "./dom.js";
import { makeFilters, narrowed, ORDERS } from "./filters.js";
import { number, plural } from "./words.js";
import { mainProgram, page, remember, run } from "./page.js";
import { drawStrip } from "./strip.js";

export const title = "Rows";

export function draw(place) {
  const filters = makeFilters(page.words, () => { remember(filters.asked()); list(); });
  const programs = h("select", { "aria-label": "Program", on: { change: () => {
    page.program = programs.value;
    filters.forget();
    remember({ ...filters.asked(), program: programs.value });
    list();
  } } });
  const found = h("div", { class: "found" }), items = h("ul"), detail = h("div", { class: "detail" });
  fill(place, h("div", { class: "bar" }, programs, filters.parts),
    h("div", { class: "split" }, h("div", { class: "list" }, found, items), detail));
  fill(detail, h("p", { class: "empty" }, "Choose a row on the left to read it."));
  let alive = true, asking = 0, listed = "", told = { count: null }, shown = null;

  async function list(quiet = false) {
    const mine = ++asking, words = filters.asked(), prompts = words.kind !== "";
    const question = { run: page.chosen, program: page.program ?? "", ...words };
    try {
      let answer = await ask("rows", question);
      const known = answer.programs.map((one) => one.program);
      if (known.length && !known.includes(page.program)) {
        page.program = mainProgram(known) ?? known.reduce((a, b) => (span(answer, b) > span(answer, a) ? b : a));
        question.program = page.program;
        answer = await ask("rows", question);
      }
      if (prompts) answer = { ...answer, ...(await ask("prompts", { ...question, silent: words.kind === "silent" ? 1 : "" })) };
      if (!alive || mine !== asking) return;
      fill(programs, known.map((name) => h("option", { value: name }, name)));
      programs.value = page.program;
      programs.hidden = known.length < 2;
      filters.offer(answer.labels);
      told = answer;
      const now = JSON.stringify([question, answer.rows, answer.prompts]);
      if (!quiet || now !== listed) {
        listed = now;
        fill(items);
        put(answer, question);
      }
      tell();
    } catch (error) {
      if (mine !== asking) return;
      listed = "";
      fill(items);
      fill(found, h("span", { class: "warn" }, error.message));
    }
  }

  function tell() {
    const all = run(), words = filters.asked();
    const count = words.kind ? `Prompts: ${ORDERS[words.order || "newest"].toLowerCase()}` : told.count !== null ? plural(told.count, "row")
      : narrowed(words) ? "Rows that fit, not counted" : `${plural(all?.rows ?? 0, "row")} in all`;
    const part = all && (all.rows_about === null || all.rows_about > all.rows);
    const about = part && all.rows_about !== null ? `${number(all.rows)} of about ${number(Number(all.rows_about.toPrecision(3)))} rows are indexed so far, and are searched` : "The rows are being indexed";
    fill(found, h("span", {}, count), part ? h("span", { class: "indexed" }, about) : "");
    if (items.querySelector("button")) return;
    const none = part ? "Nothing fits these filters so far." : all?.rows ? "Nothing fits these filters."
      : "No rows are recorded yet. A run writes some of every tenth step; --trajectories N and --trajectories-every M say how many.";
    fill(items, h("li", { class: "empty" }, none));
  }

  function put(answer, question) {
    const made = answer.prompts ? answer.prompts.map(promptItem) : answer.rows.map(rowItem);
    items.append(...made);
    if (answer.next === null) return;
    const more = h("button", { class: "more", type: "button", on: { click: async () => {
      const next = answer.prompts
        ? await ask("prompts", { ...question, silent: question.kind === "silent" ? 1 : "", page: answer.next })
        : await ask("rows", { ...question, after: answer.next });
      holder.remove();
      put(next, question);
    } } }, "More");
    const holder = h("li", {}, more);
    items.append(holder);
  }

  function rowItem(row) {
    const button = h("button", { type: "button", "data-row": row.n, "aria-current": shown === row.n ? "true" : null, on: { click: () => open(row.n) } },
      h("span", { class: "head" }, h("span", {}, `step ${number(row.step)}`), reward(row.reward), h("span", {}, plural(row.tokens, "token")),
        row.finish_reason && row.finish_reason !== "stop" ? h("span", { class: "tag" }, row.finish_reason) : ""),
      row.prompt_text ? h("bdi", { class: "line" }, one(row.prompt_text)) : "", h("bdi", { class: "line said" }, one(row.response ?? "")));
    return h("li", {}, button);
  }

  function promptItem(prompt) {
    const silent = prompt.least !== null && prompt.least === prompt.most && prompt.rows > 1;
    const button = h("button", { type: "button", on: { click: () => openGroup(prompt.step, prompt.prompt) } },
      h("span", { class: "head" }, h("span", {}, `step ${number(prompt.step)}`), reward(prompt.mean), h("span", {}, plural(prompt.rows, "row")),
        silent ? h("span", { class: "tag bad" }, "no signal") : ""),
      h("bdi", { class: "line" }, one(prompt.text || `Prompt ${prompt.prompt}`)),
      h("span", { class: "line said" }, silent ? `all rewards are ${number(prompt.least)}` : `rewards from ${number(prompt.least)} to ${number(prompt.most)}`));
    return h("li", {}, button);
  }

  async function open(n) {
    shown = n;
    items.querySelectorAll("[data-row]").forEach((button) => button.toggleAttribute("aria-current", Number(button.dataset.row) === n));
    remember({ n, step: "", prompt: "" });
    try {
      const row = await ask("row", { run: page.chosen, n });
      if (alive && shown === n) drawRow(row);
    } catch (error) {
      fill(detail, h("p", { class: "warn" }, error.message));
    }
  }

  function drawRow(row) {
    const tab = page.words.tab ?? "conversation";
    const inside = h("div");
    const has = { conversation: "Conversation", tokens: "Tokens", fields: "Fields" };
    const buttons = Object.entries(has).map(([name, said]) => h("button", { type: "button", role: "tab", "data-tab": name, "aria-selected": String(tab === name),
      on: { click: () => { remember({ tab: name }); drawRow(row); } } }, said));
    fill(detail,
      h("div", { class: "head" }, h("h2", {}, `Step ${number(row.step)}, prompt ${row.prompt}`), reward(row.reward),
        h("span", { class: "faint" }, `${plural(row.tokens, "token")}, key ${row.key}`)),
      row.others.length > 1 ? h("div", { class: "siblings" }, "Rows of this prompt", row.others.map((other) => h("button", {
        type: "button", "aria-current": other.n === row.n ? "true" : null, vars: shade(other.reward), on: { click: () => open(other.n) },
      }, number(other.reward))), h("button", { type: "button", class: "button", on: { click: () => openGroup(row.step, row.prompt) } }, "Side by side")) : "",
      h("div", { class: "tabs", role: "tablist" }, buttons), inside);
    if (tab === "tokens") drawStrip(inside, row);
    else if (tab === "fields") fill(inside, fields(row));
    else fill(inside, conversation(row.conversation, row.n));
  }

  async function openGroup(step, prompt) {
    shown = null;
    remember({ n: "", step, prompt });
    items.querySelectorAll("[aria-current]").forEach((button) => button.removeAttribute("aria-current"));
    const { rows } = await ask("group", { run: page.chosen, program: page.program, step, prompt });
    if (!alive) return;
    const known = rows.map((row) => row.reward).filter((value) => value !== null);
    const silent = known.length > 1 && new Set(known).size === 1;
    fill(detail,
      h("div", { class: "head" }, h("h2", {}, `Step ${number(step)}, prompt ${prompt}`), h("span", { class: "faint" }, plural(rows.length, "row")),
        silent ? h("span", { class: "tag bad" }, "no signal: all rewards are equal") : ""),
      rows.length ? conversation(rows[0].conversation.slice(0, asPrompt(rows[0])), rows[0].n) : "",
      h("div", { class: "columns" }, rows.map((row) => h("article", {},
        h("h3", {}, h("button", { class: "button", type: "button", on: { click: () => open(row.n) } }, "Open"), h("span", {}, reward(row.reward), ` ${plural(row.tokens, "token")}`)),
        conversation(row.conversation.slice(asPrompt(row)), row.n)))));
  }

  list().then(() => {
    if (page.words.n) open(Number(page.words.n));
    else if (page.words.step && page.words.prompt) openGroup(Number(page.words.step), page.words.prompt);
    else items.querySelector("[data-row]")?.click();
  });
  return {
    update() {
      if (items.scrollTop < 40 && items.children.length <= 51) list(true);
      else tell();
    },
    leave() { alive = false; },
  };
}

const one = (text) => text.replace(/\s+/g, " ");
const span = (answer, name) => { const of = answer.programs.find((program) => program.program === name); return of.last - of.first; };
const asPrompt = (row) => (row.conversation[0]?.who === "prompt" ? 1 : 0);

function shade(value) {
  if (value === null || value === undefined) return {};
  const strength = Math.round(10 + 30 * Math.min(1, Math.abs(value)));
  return { "--shade": value > 0 ? `color-mix(in srgb, var(--good) ${strength}%, transparent)` : value < 0 ? `color-mix(in srgb, var(--bad) ${strength}%, transparent)` : "var(--ground)" };
}

const reward = (value) => h("span", { class: "reward", title: "Reward", vars: shade(value) }, number(value));

function conversation(messages, n) {
  return messages.map((message) => h("div", { class: `message ${/^[a-z]+$/.test(message.who) ? message.who : ""}` },
    h("div", { class: "who" }, message.who),
    h("div", { class: "text" }, h("bdi", {}, message.text)),
    message.size > message.text.length ? cut(message, n, "") : ""));
}

function cut(message, n, name) {
  const field = name || (message.who === "prompt" ? "prompt" : message.who === "model" ? "response" : "messages");
  return h("p", { class: "cut" }, `The first ${number(message.text.length)} of ${number(message.size)} characters. `,
    h("a", { href: wholeText("field", { run: page.chosen, n, field }), target: "_blank", rel: "noopener" }, "Open all of it"));
}

function fields(row) {
  return h("dl", { class: "fields" }, row.fields.map((field) => [h("dt", {}, h("bdi", {}, field.name)),
    h("dd", {}, h("bdi", {}, field.text), field.size > field.text.length ? cut(field, row.n, field.name) : "")]));
}
