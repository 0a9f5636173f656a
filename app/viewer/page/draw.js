// Draws a recording: text in three views, the draft of a step, figures of a summary. Texts enter the page as text nodes
// only. Knows the page's elements, not its state.

const SVG = "http://www.w3.org/2000/svg";

// An element with attributes (fixed names) and children: nodes or texts.
function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "text") made.textContent = value;
    else if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children);
  return made;
}

function svg(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  return made;
}

function isTarget(kind) {
  return kind === "resampled" || kind === "bonus";
}

// A token that opens its card. In a group one token is in the tab order, and arrow keys go to the others.
function tokenElement(recording, part, order, open, extra) {
  const [kind, token] = part;
  const name = nameOf(recording, token);
  const made = el("span", {
    class: `token ${kind}${isTarget(kind) ? " target" : ""} ${extra || ""}`,
    role: "button",
    tabindex: "-1",
    "data-order": order,
    click: () => open(part, order),
  });
  made.textContent = name;
  const seen = name.trim() ? "" : name.includes("\n") ? "line break" : "space";
  made.setAttribute("aria-label", `${seen || name.trim()}: ${KINDS[kind].name}`);
  return made;
}

// The text in one view, with steps after the current one left out. `open(step, part)` shows a card.
function drawText(recording, steps, current, view, open) {
  const box = el("div", { class: `text view-${view}`, role: "group", "aria-label": "The generated text, by tokens" });
  if (recording.text && !recording.names.size) {
    box.append(el("p", { class: "note", text: "The engine reported the text and the steps, but not which tokens each step wrote." }));
    box.append(el("div", { class: "whole", text: recording.text }));
  }
  let drawn = 0;
  steps.slice(0, current + 1).forEach((step, order) => {
    for (const part of partsOf(step)) {
      if (part[0] === "rejected" && view !== "guesses") continue;
      if (drawn++ > 20000) return;
      const now = order === current ? "now" : "";
      box.append(tokenElement(recording, part, order, (one) => open(step, one), now));
    }
  });
  if (drawn > 20000) box.append(el("p", { class: "note", text: "Further tokens are not drawn." }));
  return roving(box, ".token");
}

// One element of a group in the tab order; arrows, Home and End move, Enter and space press. `columns`: a grid.
function roving(box, selector, columns) {
  const all = () => [...box.querySelectorAll(selector)];
  const items = all();
  const first = items.findIndex((one) => one.classList.contains("now"));
  if (items.length) items[Math.max(first, 0)].setAttribute("tabindex", "0");
  box.addEventListener("keydown", (event) => {
    const now = all();
    const at = now.indexOf(event.target);
    if (at < 0) return;
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns || 1, ArrowUp: -(columns || 1) }[event.key];
    let to = move ? at + move : event.key === "Home" ? 0 : event.key === "End" ? now.length - 1 : null;
    if (event.key === "Enter" || event.key === " ") {
      now[at].click();
      event.preventDefault();
      event.stopPropagation();
      return;
    }
    if (to === null) return;
    to = Math.min(Math.max(to, 0), now.length - 1);
    now[at].setAttribute("tabindex", "-1");
    now[to].setAttribute("tabindex", "0");
    now[to].focus();
    event.preventDefault();
    event.stopPropagation();
  });
  return box;
}

// ---- the draft of one step

const NODE = { width: 104, height: 46, across: 22, down: 8, most: 72 };

// Nodes to draw: all, or the tried ones first; always with their parents.
function shownNodes(step) {
  const count = step.drafted.length;
  if (count <= NODE.most) return step.drafted.map((_, node) => node);
  const wanted = new Set([...step.path, ...step.drafted.keys()].filter((n) => step.path.includes(n) || step.tried[n]).slice(0, NODE.most));
  for (let node = 0; node < count && wanted.size < NODE.most; node += 1) {
    if (step.parents[node] < 0 || wanted.has(step.parents[node])) wanted.add(node);
  }
  return [...wanted].filter((node) => step.parents[node] < 0 || wanted.has(step.parents[node])).sort((a, b) => a - b);
}

function kindOf(step, node) {
  const level = step.path.indexOf(node);
  if (level >= 0) return step.sources[level];
  return step.tried[node] ? "rejected" : "untried";
}

// Column and row of each node: the first child stays in its parent's row.
function layout(nodes, parents) {
  const children = new Map();
  for (const node of nodes) {
    const parent = parents(node);
    children.set(parent, [...(children.get(parent) ?? []), node]);
  }
  const places = new Map();
  let last = 0;
  const pending = (children.get(-1) ?? []).map((node, i) => [node, 0, i > 0]).reverse();
  while (pending.length) {
    const [node, depth, fresh] = pending.pop();
    last += fresh ? 1 : 0;
    places.set(node, [depth, last]);
    pending.push(...(children.get(node) ?? []).map((child, i) => [child, depth + 1, i > 0]).reverse());
  }
  return places;
}

function drawDraft(recording, step, open) {
  const nodes = shownNodes(step);
  const own = step.drafted.length; // the target's token stands behind the draft
  const ends = step.path.length < step.emitted.length;
  const places = layout(ends ? [...nodes, own] : nodes, (node) =>
    node === own ? (step.path.length ? step.path[step.path.length - 1] : -1) : step.parents[node]);
  const x = (place) => place[0] * (NODE.width + NODE.across);
  const y = (place) => place[1] * (NODE.height + NODE.down);
  const wide = Math.max(...[...places.values()].map((place) => x(place) + NODE.width), NODE.width);
  const high = Math.max(...[...places.values()].map((place) => y(place) + NODE.height), NODE.height);
  const edges = svg("svg", { width: wide, height: high, "aria-hidden": "true" });
  const box = el("div", { class: "draft", role: "group", "aria-label": "The draft of this step" }, edges);
  box.style.width = `${wide}px`;
  box.style.height = `${high}px`;
  for (const [node, place] of places) {
    const parent = node === own ? (step.path.length ? step.path[step.path.length - 1] : -1) : step.parents[node];
    const from = places.get(parent);
    if (from) {
      const [a, b, c, d] = [x(from) + NODE.width, y(from) + NODE.height / 2, x(place), y(place) + NODE.height / 2];
      edges.append(svg("path", { d: `M${a} ${b}C${(a + c) / 2} ${b} ${(a + c) / 2} ${d} ${c} ${d}` }));
    }
    const kind = node === own ? step.sources[step.sources.length - 1] : kindOf(step, node);
    const token = node === own ? step.emitted[step.emitted.length - 1] : step.drafted[node];
    const level = node === own ? step.emitted.length - 1 : step.path.includes(node) ? step.path.indexOf(node) : null;
    const part = [kind, token, node === own ? null : node, level];
    const made = el("span", {
      class: `node ${kind}${isTarget(kind) ? " target" : ""}`, role: "button", tabindex: "-1", click: () => open(step, part),
    });
    made.style.left = `${x(place)}px`;
    made.style.top = `${y(place)}px`;
    const name = quoted(recording, token).slice(1, -1);
    made.append(el("b", { text: `${KINDS[kind].mark} ${name}` }));
    const numbers = node === own ? "by the target" : step.p.length && step.tried[node]
      ? `p ${step.p[node].toFixed(2)}  ${step.fixed[node] ? "fixed" : `q ${step.q[node].toFixed(2)}`}` : "";
    made.append(el("small", { text: numbers || (kind === "untried" ? "not reached" : "") }));
    made.setAttribute("aria-label", `${name}: ${KINDS[kind].name}`);
    box.append(made);
  }
  const parts = [roving(box, ".node")];
  if (nodes.length < step.drafted.length) {
    parts.push(el("p", { class: "note", text: `${step.drafted.length - nodes.length} more draft tokens, not reached.` }));
  }
  return parts;
}

// ---- summaries

function drawSummary(found) {
  const parts = [el("p", { class: "note", text: `${found.engine} reported totals, not the order of steps, so there is nothing to step through.` })];
  const rows = [
    ["tokens", found.tokens], ["target passes", found.passes],
    ["draft tokens", found.drafted], ["of them accepted", found.accepted],
    ["acceptance rate", found.drafted ? (found.accepted / found.drafted).toFixed(3) : null],
    ["tokens per verification step", found.passes ? (1 + found.accepted / found.passes).toFixed(2) : null],
    ["most draft tokens a step", found.longest],
    ["seconds of decoding", found.seconds === null ? null : found.seconds.toFixed(2)],
  ].filter(([, value]) => value !== null);
  parts.push(el("dl", { class: "figures" }, ...rows.map(([name, value]) =>
    el("div", {}, el("dt", { text: name }), el("dd", { text: String(value) })))));
  if (found.histogram) {
    const most = Math.max(1, ...found.histogram);
    parts.push(el("h3", { text: "How many draft tokens a step accepted" }));
    parts.push(el("table", { class: "bars" }, el("tbody", {}, ...found.histogram.slice(0, 65).map((count, accepted) => {
      const bar = el("div", { class: "bar" });
      bar.style.width = `${(100 * count) / most}%`;
      return el("tr", {}, el("th", { scope: "row", text: String(accepted) }), el("td", {}, bar), el("td", { text: `${count} steps` }));
    }))));
  }
  if (found.text) parts.push(el("h3", { text: "The text" }), el("div", { class: "whole", text: found.text }));
  return parts;
}
