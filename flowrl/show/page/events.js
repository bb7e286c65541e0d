// Events: alarms and hints of the health rules, warnings, resumes, failures.
import { ask, wholeText } from "./ask.js";
import { fill, h } from "./dom.js";
import { moment, number } from "./words.js";
import { page, remember } from "./page.js";

export const title = "Events";
export const count = (run) => (run.alarms ? number(run.alarms) : "");

export function draw(place) {
  const kind = h("select", { "aria-label": "Kind", on: { change: () => { remember({ kind: kind.value }); show(); } } });
  const list = h("ul", { class: "events" });
  fill(place, h("div", { class: "bar" }, kind), list);
  let alive = true, listed = "";

  async function show() {
    const asked = { run: page.chosen, kind: page.words.kind ?? "" };
    const answer = await ask("events", asked);
    const now = JSON.stringify([asked, answer]);
    if (!alive || now === listed) return;
    listed = now;
    fill(kind, h("option", { value: "" }, "All kinds"), answer.kinds.map(([name, many]) => h("option", { value: name }, `${name} (${number(many)})`)));
    kind.value = asked.kind;
    kind.hidden = answer.kinds.length < 2;
    fill(list);
    put(answer, asked);
    if (!list.children.length) fill(list, h("li", { class: "empty" }, "Nothing has happened that a reader should know of: no alarm, no warning, no resume."));
  }

  function put(answer, asked) {
    list.append(...answer.events.map(item));
    if (answer.next === null) return;
    const holder = h("li", {}, h("button", { class: "more", type: "button", on: { click: async () => {
      const next = await ask("events", { ...asked, before: answer.next });
      holder.remove();
      put(next, asked);
    } } }, "Earlier"));
    list.append(holder);
  }

  show();
  return { update: () => show(), leave() { alive = false; } };
}

const LOOKS = { alarm: "bad", warning: "noted", note: null };

function item(event) {
  const [first, ...rest] = event.text.split("\n");
  return h("li", { class: LOOKS[event.level] },
    h("div", { class: "head" }, h("span", { class: "tag" }, event.kind), h("time", {}, moment(event.time))),
    h("div", { class: "said" }, h("bdi", {}, first)), rest.length ? h("pre", {}, rest.join("\n")) : "",
    event.size > 4100 ? h("a", { href: wholeText("event", { run: page.chosen, at: event.at, size: event.size }), target: "_blank", rel: "noopener" }, "Open all of it") : "");
}
