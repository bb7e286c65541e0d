// The filters of rows: what is listed, in which order, between which bounds, and with which labels.
import { debounce, fill, h } from "./dom.js";
import { number } from "./words.js";

export const ORDERS = { newest: "Newest first", oldest: "Oldest first", best: "Highest reward", worst: "Lowest reward", longest: "Longest", shortest: "Shortest" };
const OF_ROWS = ["longest", "shortest"]; // orders that prompts do not have
const KINDS = { "": "Rows", prompts: "Prompts", silent: "Prompts without a signal" };
const LABEL = "is."; // before the name of a label in an address
const BOUNDS = [
  ["Step", { first: "From step", last: "To step" }, {}],
  ["Tokens", { min_tokens: "Tokens from", max_tokens: "Tokens to" }, { min: 0 }],
  ["Reward", { least: "Reward from", most: "Reward to" }, { step: "any" }],
];

// `words` are those of the address; `changed` is called when others are asked for.
export function makeFilters(words, changed) {
  const soon = debounce(changed, 250);
  const choice = (name, said, options) => h("select", { "aria-label": said, on: { input: soon } },
    Object.entries(options).map(([value, text]) => h("option", { value, selected: (words[name] ?? "") === value }, text)));
  const fields = {
    kind: choice("kind", "What is listed", KINDS),
    text: h("input", { type: "search", value: words.text ?? "", placeholder: "Search words", "aria-label": "Search the texts of rows", on: { input: soon } }),
    order: choice("order", "Order", ORDERS),
  };
  const bounds = BOUNDS.map(([title, ends, look]) => h("label", {}, `${title} `, Object.entries(ends).map(([name, said], place) =>
    (fields[name] = h("input", { type: "number", value: words[name] ?? "", placeholder: place ? "to" : "from", "aria-label": said, ...look, on: { input: soon } })))));
  const chosen = Object.fromEntries(Object.entries(words).filter(([name]) => name.startsWith(LABEL)));
  const labels = h("span", { class: "labels" });
  const clear = h("button", { class: "button", type: "button", on: { click: () => {
    for (const [name, field] of Object.entries(fields)) if (name !== "kind" && name !== "order") field.value = "";
    forget();
    changed();
  } } }, "Clear filters");
  let drawn = "";

  function asked() {
    const prompts = fields.kind.value !== "";
    for (const one of fields.order.options) one.disabled = prompts && OF_ROWS.includes(one.value);
    if (prompts && OF_ROWS.includes(fields.order.value)) fields.order.value = "newest";
    const values = Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, field.value]));
    const found = { ...values, ...chosen, order: values.order === "newest" ? "" : values.order };
    clear.hidden = !narrowed(found);
    return found;
  }

  function forget() { // the labels that are chosen
    for (const name of Object.keys(chosen)) chosen[name] = "";
    for (const select of labels.querySelectorAll("select")) select.value = "";
  }

  function offer(known) { // a choice for each label that tells rows apart
    const now = JSON.stringify(known);
    if (now === drawn || labels.contains(document.activeElement)) return;
    drawn = now;
    fill(labels, Object.entries(known).filter(([name, values]) => values.length > 1 || chosen[LABEL + name]).map(([name, values]) => {
      const select = h("select", { "aria-label": `Rows by ${name}`, "data-label": name, on: { input: () => { chosen[LABEL + name] = select.value; soon(); } } },
        h("option", { value: "" }, "any"), values.map(([value, rows]) => option(value, `${value} (${number(rows)})`)));
      select.value = chosen[LABEL + name] ?? "";
      return h("label", {}, h("bdi", {}, name.replaceAll("_", " ")), " ", select);
    }));
  }

  return { fields, parts: [fields.kind, fields.text, fields.order, bounds, labels, clear], asked, forget, offer };
}

// Whether some rows are left out.
export const narrowed = (asked) => Object.entries(asked).some(([name, value]) => value && name !== "kind" && name !== "order");

// A value is sent back as it is, whatever signs it has; what is read is made visible.
function option(value, text) {
  const made = h("option", {}, text);
  made.value = value;
  return made;
}
