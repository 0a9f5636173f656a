// What a trace says in words: the kind of each token, the sentence of a step, the headline figures, and the random numbers
// by which guesses were accepted. Knows nothing of the page.

const KINDS = {
  drafted: { mark: "✓", name: "drafted and accepted" },
  relaxed: { mark: "~", name: "drafted, accepted only because the rule is relaxed" },
  resampled: { mark: "*", name: "chosen by the target after a rejection" },
  bonus: { mark: "+", name: "chosen by the target" },
  rejected: { mark: "✗", name: "drafted and rejected" },
  untried: { mark: "·", name: "drafted, not reached" },
};

function nameOf(recording, token) {
  if (token < 0) return "□";
  const unit = recording.modality === "text" ? "#" : "code ";
  return recording.names.get(token) ?? `${unit}${token}${recording.modality === "text" ? " " : ""}`;
}

// A token's text in a sentence: short, with visible white space.
function quoted(recording, token) {
  const name = nameOf(recording, token).replace(/\n/g, "⏎").replace(/\t/g, "⇥");
  const short = name.length > 24 ? `${name.slice(0, 23)}…` : name;
  return `“${short.trim() || "␣"}”`;
}

function childrenTried(step, parent) {
  return step.parents.flatMap((one, node) => (one === parent && step.tried[node] ? [node] : []));
}

// [kind, token, node or null, index among the emitted tokens or null], in the order in which they are shown.
function partsOf(step) {
  const parts = [];
  step.emitted.forEach((token, level) => {
    const accepted = level < step.path.length ? step.path[level] : null;
    if (level <= step.path.length) {
      for (const node of childrenTried(step, level ? step.path[level - 1] : -1).slice(0, 32)) {
        if (node !== accepted) parts.push(["rejected", step.drafted[node], node, null]);
      }
    }
    parts.push([step.sources[level], token, accepted, level]);
  });
  return parts;
}

function depthOf(step) {
  const depths = [];
  step.parents.forEach((parent) => depths.push(parent < 0 ? 1 : depths[parent] + 1));
  return depths.reduce((most, one) => Math.max(most, one), 0);
}

function acceptedOf(step) {
  return step.sources.filter((one) => one === "drafted" || one === "relaxed").length;
}

const ENDINGS = { end: " The answer ends here.", stop: " A stop string ends it here.", limit: " The limit is reached." };

// As `sentence` of app/viz/story.py.
function sentence(recording, step) {
  if (!step.emitted.length) return "Nothing was committed.";
  const said = (token) => (token < 0 ? "another token" : quoted(recording, token));
  const last = said(step.emitted[step.emitted.length - 1]), ending = ENDINGS[step.finish] ?? "";
  if (!step.drafted.length) return `No guess: one target pass wrote ${last}.${ending}`;
  const guessed = step.drafted.length, kept = acceptedOf(step), source = step.sources[step.sources.length - 1];
  const howMany = !kept ? "none" : kept < guessed ? kept : kept === 1 ? "it" : "all";
  let text = `Guessed ${guessed}${guessed > depthOf(step) ? " in a tree" : ""}, kept ${howMany}`;
  if (source === "bonus") text += `; the same target pass added ${last}`;
  if (source === "resampled") {
    const wrong = childrenTried(step, step.path.length ? step.path[step.path.length - 1] : -1)[0];
    const instead = wrong !== undefined && step.drafted[wrong] >= 0 ? `, not ${said(step.drafted[wrong])}` : "";
    text += `; the target wanted ${last}${instead}, so the rest was discarded`;
  }
  const relaxed = step.sources.filter((one) => one === "relaxed").length;
  return `${text}.${relaxed ? ` ${relaxed} of them only because the rule is relaxed.` : ""}${ending}`;
}

function figures(steps) {
  const rounds = new Map(steps.map((step) => [step.index, step.seconds]));
  const tokens = steps.reduce((sum, step) => sum + step.emitted.length, 0);
  return {
    tokens,
    passes: steps.length,
    drafted: steps.reduce((sum, step) => sum + step.drafted.length, 0),
    accepted: steps.reduce((sum, step) => sum + acceptedOf(step), 0),
    seconds: [...rounds.values()].reduce((sum, one) => sum + one, 0),
  };
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return (sorted[Math.floor((sorted.length - 1) / 2)] + sorted[Math.ceil((sorted.length - 1) / 2)]) / 2;
}

function headline(recording, steps) {
  const own = figures(steps);
  const parts = [`${own.tokens} tokens in ${own.passes} target passes`];
  parts[0] += `: ${(own.tokens / own.passes).toFixed(2)} tokens per pass`;
  if (own.drafted) parts.push(`${own.accepted} of ${own.drafted} draft tokens accepted`);
  const unplaced = recording.trace.options.tokens_without_a_place;
  if (unplaced > 0) parts.push(`${unplaced} more tokens from passes without a draft, whose place the engine did not report`);
  if (recording.plain) {
    const plain = figures(recording.plain.trace.steps);
    parts.push(`plain decoding took ${plain.passes} passes for ${plain.tokens} tokens`);
    if (plain.seconds > 0 && own.seconds > 0) {
      const [before, after] = [[plain, recording.plain], [own, recording]].map(([run, file]) =>
        median([run.seconds, ...file.timings]) / run.tokens);
      const timed = Math.min(recording.timings.length, recording.plain.timings.length) + 1;
      parts.push(`${(before / after).toFixed(2)} times as fast, ${timed === 1 ? "timed once" : `the median of ${timed} timings`}`);
    }
  }
  return `${parts.join("; ")}.`;
}

// ---- random numbers

const MASK = (1n << 64n) - 1n, GOLDEN = 0x9e3779b97f4a7c15n, ACCEPT = 1n;

function mix(value) {
  let z = (value + GOLDEN) & MASK;
  z = ((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  z = ((z ^ (z >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return z ^ (z >> 31n);
}

// The uniform by which a node was tried: a hash of seed, row, step and node (outrider.core.rng).
function uniform(trace, step, node) {
  const seed = Array.isArray(trace.seed) ? trace.seed[step.row] : trace.seed;
  if (!Number.isSafeInteger(seed)) return null;
  const row = Array.isArray(trace.seed) ? mix(mix(BigInt(seed))) : mix((mix(BigInt.asUintN(64, BigInt(seed))) + BigInt(step.row)) & MASK);
  const base = mix(mix((row + BigInt(step.index)) & MASK) ^ mix(ACCEPT));
  const bits = mix((base + BigInt(node) * GOLDEN) & MASK) & 0xffffffffn;
  return (Number(bits) + 0.5) / 2 ** 32;
}

// How a trace's random numbers decided: "token" if a guess was accepted where its uniform is below its chance, "block" if the
// guesses up to the last such one were (block verification), null if neither explains every step. Then no numbers are
// shown: the rule decides in another way (gumbel-match), or another engine wrote the trace.
function dicePlan(trace) {
  if (trace.options.temperature === 0 || trace.options.engine) return null;
  const plans = { token: 0, block: 0 };
  for (const step of trace.steps) {
    const tried = step.chance.length ? [...step.drafted.keys()].filter((node) => step.tried[node]) : [];
    if (!tried.length) continue;
    const passed = new Map(tried.map((node) => [node, uniform(trace, step, node)]));
    if ([...passed.values()].includes(null)) return null;
    for (const [node, value] of passed) passed.set(node, value < step.chance[node]);
    const isChain = step.parents.every((parent, node) => parent === node - 1);
    const last = tried.filter((node) => passed.get(node)).pop() ?? -1;
    const cut = step.finish !== null && step.finish !== ""; // the end cut what had been accepted
    const token = tried.every((node) => passed.get(node) === step.path.includes(node) || (cut && passed.get(node)));
    const block = isChain && (last + 1 === step.path.length || (cut && last + 1 > step.path.length));
    if (!token && !block) return null;
    if (!token) plans.token = null;
    if (!block) plans.block = null;
    for (const name of ["token", "block"]) if (plans[name] !== null) plans[name] += 1;
    if (plans.token === null && plans.block === null) return null;
  }
  const whole = trace.steps.some((step) => step.tried.some((one, node) =>
    one && step.parents[node] >= 0 && !step.path.includes(step.parents[node])));
  if (whole) return plans.block ? "block" : null; // guesses behind a rejected one were tried
  return plans.token ? "token" : null;
}
