// The card of one token: p and q as bars, the random number, and the decision.

function meter(name, value, kind, mark) {
  const fill = el("div", { class: `fill ${kind}` });
  fill.style.width = `${100 * Math.min(Math.max(value, 0), 1)}%`;
  const track = el("div", { class: "meter", role: "img" }, fill);
  let said = `${name}: ${value.toFixed(4)}`;
  if (mark !== null && mark !== undefined) {
    const line = el("div", { class: "dice" });
    line.style.left = `${100 * mark}%`;
    track.append(line);
    said += `, random number ${mark.toFixed(4)}`;
  }
  track.setAttribute("aria-label", said);
  return el("div", { class: "row" }, el("span", { text: name }), track, el("span", { class: "value", text: value.toFixed(value < 0.01 ? 4 : 3) }));
}

function fillCard(dialog, recording, step, part, dice) {
  const [kind, token, node, level] = part;
  const name = quoted(recording, token);
  const body = dialog.querySelector(".body");
  body.replaceChildren();
  dialog.querySelector("h2").textContent = name;
  body.append(el("p", { class: "kind" }, el("span", { class: `chip ${kind}${isTarget(kind) ? " target" : ""}`, text: KINDS[kind].mark }),
    ` ${KINDS[kind].name}, target pass ${step.index + 1}${token >= 0 ? `, id ${token}` : ""}`));
  if (node !== null && step.p.length && step.tried[node]) {
    body.append(meter("p, of the target", step.p[node], "p"));
    if (step.fixed[node]) body.append(el("p", { class: "note", text: "A fixed guess: it was not drawn from a distribution, so q counts as 1." }));
    else body.append(meter("q, of the drafter", step.q[node], "q"));
    const value = dice ? uniform(recording.trace, step, node) : null;
    body.append(meter("chance of acceptance", step.chance[node], "chance", value));
    const greedy = recording.trace.options.temperature === 0;
    body.append(el("p", { class: "decision", text: greedy ? "At temperature 0 no random number is drawn: the target’s likeliest token wins." : decision(step, node, value, dice) }));
  } else if (node !== null && kind === "untried") {
    body.append(el("p", { class: "decision", text: "The rule never came to this guess: one before it was rejected, or another one accepted." }));
  } else if (node !== null) {
    body.append(el("p", { class: "note", text: "The engine reported no probabilities for this token." }));
  } else {
    const after = kind === "resampled"
      ? "Drawn from the residual: what is left of p where q does not cover it, max(0, p − q), normalised."
      : step.drafted.length ? "The whole path was accepted, so the pass gave one token more: drawn from p itself."
        : "A pass without a draft: drawn from p itself.";
    body.append(el("p", { class: "decision", text: recording.trace.options.temperature === 0 ? `${after} At temperature 0 it is the likeliest token.` : after }));
  }
  if (level !== null && step.variation.length && step.variation[level] > 0) {
    body.append(el("p", { class: "note", text: `The rule moved the distribution of this token by a total variation of ${step.variation[level].toFixed(4)}.` }));
  }
  const likely = level !== null && step.alternatives.length ? step.alternatives[level] : [];
  if (likely.length) {
    body.append(el("h3", { text: "The target’s likeliest here" }));
    for (const [other, share] of likely) body.append(meter(quoted(recording, other), share, "p"));
  }
}

function decision(step, node, value, dice) {
  const chance = step.chance[node];
  const said = step.path.includes(node) ? "accepted" : "rejected";
  if (value !== null && dice === "block") {
    const below = value < chance ? "below" : "not below";
    return `Block verification keeps the guesses up to the last one whose random number is below its chance. Here ` +
      `${value.toFixed(4)} is ${below} ${chance.toFixed(4)}; the guess was ${said}.`;
  }
  if (value !== null && chance > 0 && chance < 1) {
    const below = value < chance ? "below" : "not below";
    return `The random number ${value.toFixed(4)} is ${below} the chance ${chance.toFixed(4)}, so the guess was ${said}.`;
  }
  if (chance >= 1) return `The chance is 1: ${said} whatever the random number.`;
  if (chance <= 0) return `The chance is 0: ${said} whatever the random number.`;
  return `The guess was ${said}.`;
}
