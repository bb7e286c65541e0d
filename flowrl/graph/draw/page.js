"use strict";
// The page of a graph: pan and zoom, cards, highlighting, keys. Texts are set as text, never as markup.
(() => {
  const { cards, order } = JSON.parse(document.getElementById("cards").textContent);
  const view = document.getElementById("view");
  const SHRUNK = 1.04; // how much larger than its room a picture may be: words of 11.5 points stay above 11 pixels
  const pictures = [...view.querySelectorAll("svg")]; // a wide one and a narrow one
  const card = document.getElementById("card");
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const rows = new Map(all("[data-row]").map((row) => [row.dataset.row, row]));
  let kept = null;

  // -- the picture: the wide one where it fits in its own size, so that its words can be read, else the column -------
  const sizes = new Map(pictures.map((svg) => [svg, { ...rect(svg.viewBox.baseVal) }]));
  let svg, nodes, groups, edges, labels, full, seen;

  function rect({ width, height }) {
    return { width, height };
  }

  function take() {
    const room = view.clientWidth;
    const fits = pictures.find((picture) => sizes.get(picture).width <= SHRUNK * room) || pictures[pictures.length - 1];
    if (fits !== svg) {
      svg = fits;
      for (const picture of pictures) {
        picture.toggleAttribute("hidden", picture !== svg);
        picture.classList.toggle("taken", picture === svg);
      }
      nodes = new Map(all(".node", svg).map((g) => [g.dataset.id, g]));
      groups = new Map(all(".group", svg).map((g) => [g.dataset.id, g]));
      edges = all(".edge", svg);
      labels = all(".label", svg);
    }
    const { width, height } = sizes.get(svg);
    const wide = Math.max(width, room || width); // what is smaller than its room is not blown up
    full = { x: (width - wide) / 2, y: 0, width: wide, height };
    view.style.height = `${(height * (room || wide)) / wide}px`;
    view.classList.add("fitted");
    look({ ...full });
  }

  // -- pan and zoom: the view box is what is seen ---------------------------------------------------------------

  function look(box) {
    seen = box;
    svg.setAttribute("viewBox", `${box.x} ${box.y} ${box.width} ${box.height}`);
  }

  function zoom(factor, at) {
    const width = Math.min(Math.max(seen.width / factor, full.width / 12), full.width * 2);
    const real = seen.width / width;
    const x = at ? at.x : seen.x + seen.width / 2;
    const y = at ? at.y : seen.y + seen.height / 2;
    look({ x: x - (x - seen.x) / real, y: y - (y - seen.y) / real, width, height: seen.height / real });
  }

  function point(event) {
    const inverse = svg.getScreenCTM().inverse();
    return new DOMPoint(event.clientX, event.clientY).matrixTransform(inverse);
  }

  view.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the plain wheel scrolls the page
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 300), point(event));
  }, { passive: false });

  let drag = null;
  view.addEventListener("pointerdown", (event) => {
    if (event.button === 0) drag = { from: point(event), moved: false, id: event.pointerId };
  });
  view.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const now = point(event);
    if (!drag.moved && Math.hypot(now.x - drag.from.x, now.y - drag.from.y) < 3) return;
    if (!drag.moved) view.setPointerCapture(drag.id); // only now: a captured pointer would swallow the click on a node
    drag.moved = true;
    view.classList.add("moving");
    look({ ...seen, x: seen.x + drag.from.x - now.x, y: seen.y + drag.from.y - now.y });
  });
  for (const end of ["pointerup", "pointercancel"]) {
    view.addEventListener(end, (event) => {
      view.classList.remove("moving");
      if (drag && !drag.moved && end === "pointerup") click(event.target);
      drag = null;
    });
  }
  const zooms = { in: () => zoom(1.3), out: () => zoom(1 / 1.3), fit: () => look({ ...full }) };
  for (const button of all("[data-zoom]")) button.addEventListener("click", zooms[button.dataset.zoom]);

  // -- highlighting -----------------------------------------------------------------------------------------------
  function light(on, chosen) {
    view.classList.add("lit");
    for (const g of [...nodes.values(), ...edges, ...labels]) g.classList.toggle("on", on.has(g.dataset.id));
    const homes = new Set([...on].map((id) => (nodes.has(id) ? nodes.get(id).dataset.group : id)));
    for (const g of all(".group, .group-title", svg)) g.classList.toggle("on", homes.has(g.dataset.id));
    for (const [id, g] of nodes) g.classList.toggle("chosen", id === chosen);
    for (const [id, row] of rows) row.classList.toggle("on", id === chosen);
  }

  function lightNode(id) {
    const on = new Set([id]);
    for (const edge of edges) {
      const { src, dst } = edge.dataset;
      if (src !== id && dst !== id) continue;
      on.add(edge.dataset.id);
      on.add(src);
      on.add(dst);
    }
    light(on, id);
  }

  function lightEdge(edge) {
    light(new Set([edge.dataset.id, edge.dataset.src, edge.dataset.dst]), null);
  }

  function dark() {
    view.classList.remove("lit");
    light(new Set(), null);
    view.classList.remove("lit");
  }

  // -- cards --------------------------------------------------------------------------------------------------------
  function element(tag, text, name) {
    const made = document.createElement(tag);
    made.textContent = text;
    if (name) made.className = name;
    return made;
  }

  function fieldList(card) {
    const list = document.createElement("dl");
    for (const side of ["reads", "adds"]) {
      if (!card[side] || !card[side].length) continue;
      list.append(element("dt", side));
      for (const [name, type] of card[side]) list.append(element("dd", name), element("dd", type, "type"));
    }
    return list.childElementCount ? [list] : [];
  }

  function fill(about) {
    const head = element("h2", about.title);
    if (about.kind) head.append(element("span", about.kind));
    const parts = [head];
    if (about.condition) parts.push(element("p", about.condition, "condition"));
    for (const line of about.text || []) parts.push(element("p", line));
    for (const line of about.plan || []) parts.push(element("p", line, "plan"));
    if (about.source) parts.push(element("p", about.source, "source"));
    if (about.place) parts.push(element("p", about.place, "place"));
    if (about.signature) parts.push(element("p", about.signature, "signature"));
    if (about.marks && about.marks.length) parts.push(element("p", about.marks.join(", ")));
    card.replaceChildren(...parts, ...fieldList(about));
  }

  function show(about, box) {
    if (!about) return;
    fill(about);
    card.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = card;
    let x = box.right + 14; // beside it where there is room, else below or above
    let y = box.top;
    if (x + width > innerWidth - 8) x = box.left - 14 - width;
    if (x < 8) {
      x = Math.min(Math.max(8, box.left), Math.max(8, innerWidth - width - 8));
      y = box.bottom + 10 + height < innerHeight ? box.bottom + 10 : box.top - 10 - height;
    }
    y = Math.min(Math.max(8, y), Math.max(8, innerHeight - height - 8));
    card.style.left = `${x}px`;
    card.style.top = `${y}px`;
  }

  function hide() {
    card.hidden = true;
    card.classList.remove("kept");
    kept = null;
    dark();
  }

  function showNode(id) {
    const g = nodes.get(id);
    if (!g) return;
    lightNode(id);
    show(cards[id], g.getBoundingClientRect());
  }

  function keep(id) {
    showNode(id);
    kept = id;
    card.classList.add("kept");
  }

  function click(target) {
    const g = target.closest ? target.closest(".node") : null;
    if (g && kept !== g.dataset.id) keep(g.dataset.id);
    else hide();
  }

  // -- what is hovered, focused, typed ------------------------------------------------------------------------------
  take();
  addEventListener("resize", () => { hide(); take(); });
  for (const g of all(".node, .group, .edge", view)) {
    const title = g.querySelector("title"); // the card says it better
    g.setAttribute("aria-label", title ? title.textContent : g.dataset.id);
    if (title) title.remove();
  }
  for (const caption of all("svg > title", view)) caption.remove(); // its text is the label of the picture already
  for (const g of all(".node", view)) {
    const { id } = g.dataset;
    g.setAttribute("tabindex", "0");
    g.setAttribute("role", "button");
    g.addEventListener("pointerenter", () => { if (!kept && !drag) showNode(id); });
    g.addEventListener("pointerleave", () => { if (!kept) hide(); });
    g.addEventListener("focus", () => { if (g.matches(":focus-visible")) keep(id); });
  }
  for (const edge of all(".edge", view)) {
    edge.addEventListener("pointermove", (event) => {
      if (kept || drag) return;
      lightEdge(edge);
      const { clientX: x, clientY: y } = event;
      show(cards[edge.dataset.id], { left: x, right: x, top: y + 12, bottom: y + 12 });
    });
    edge.addEventListener("pointerleave", () => { if (!kept) hide(); });
  }
  for (const button of all("[data-show]")) {
    const id = button.dataset.show;
    button.addEventListener("click", () => {
      view.scrollIntoView({ block: "nearest" });
      keep(id);
    });
  }
  for (const [id, row] of rows) {
    row.addEventListener("pointerenter", () => { if (!kept) lightNode(id); });
    row.addEventListener("pointerleave", () => { if (!kept) dark(); });
  }

  function step(id, key) {
    const along = { ArrowUp: ["dst", "src"], ArrowDown: ["src", "dst"] }[key];
    if (along) {
      const next = edges.find((edge) => edge.dataset[along[0]] === id && edge.classList.contains("data"));
      return next && next.dataset[along[1]];
    }
    const move = { ArrowLeft: -1, ArrowRight: 1 }[key];
    return move && order[order.indexOf(id) + move];
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") hide();
    else if (event.key === "+" || event.key === "=") zooms.in();
    else if (event.key === "-") zooms.out();
    else if (event.key === "0") zooms.fit();
    const here = document.activeElement;
    if (!here || !here.classList.contains("node")) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      click(here);
      return;
    }
    const next = nodes.get(step(here.dataset.id, event.key));
    if (next) {
      event.preventDefault();
      next.focus();
      keep(next.dataset.id);
    }
  });
  addEventListener("scroll", () => { if (!kept) hide(); else showNode(kept); }, { passive: true });

  document.body.dataset.nodes = String(nodes.size);
  document.body.dataset.edges = String(edges.length);
  document.body.dataset.ready = "1";
})();
