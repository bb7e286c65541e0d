// Asks the server. The token comes with the address and is kept for this tab, so that it does not stay in the address.

const given = new URLSearchParams(location.search).get("token");
if (given) {
  sessionStorage.setItem("flowrl-token", given);
  history.replaceState(null, "", location.pathname + location.hash);
}
const token = sessionStorage.getItem("flowrl-token") ?? "";

export async function ask(what, words = {}) {
  const answer = await fetch(place(what, words), { headers: { "X-Flowrl-Token": token } });
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error ?? `The server answered ${answer.status}.`);
  return said;
}

export function place(what, words = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(words)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null && one !== "") query.append(name, one);
    }
  }
  return `/api/${what}?${query}`;
}

// The whole of a text that was cut, as a page of plain text.
export function wholeText(what, words) {
  return place(what, { ...words, token });
}
