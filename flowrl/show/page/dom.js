// Makes elements. Whatever comes from a run goes through `visible` into a text node, and never into markup.

export function h(tag, look = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(look)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [what, does] of Object.entries(value)) made.addEventListener(what, does);
    else if (name === "vars") for (const [variable, text] of Object.entries(value)) made.style.setProperty(variable, text);
    else if (name === "value") made.value = value;
    else made.setAttribute(name, value === true ? "" : visible(String(value)));
  }
  add(made, children);
  return made;
}

export function add(element, children) {
  for (const child of children.flat(3)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(String(child))));
  }
}

export function fill(element, ...children) {
  element.replaceChildren();
  add(element, children);
}

// Control characters, marks that turn the direction of writing around and halves of characters are shown as signs.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
const HALVES = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

export function visible(text) {
  return text.replace(HALVES, "\ufffd").replace(UNSEEN, (sign) => {
    const code = sign.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

export function debounce(does, after) {
  let waiting;
  return (...given) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => does(...given), after);
  };
}

const card = document.getElementById("card");

export function showCard(event, ...children) {
  fill(card, ...children);
  card.hidden = false;
  const box = card.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, innerWidth - box.width - 8);
  const top = event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18;
  card.style.left = `${Math.max(8, left)}px`;
  card.style.top = `${Math.max(8, top)}px`;
}

export function hideCard() {
  card.hidden = true;
}
