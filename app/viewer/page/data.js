// Reads a file's text into a recording or a summary. Every value is checked and bounded; texts stay texts, so that a
// hostile file can't become markup. Knows nothing of the page.

const LIMITS = { bytes: 5e6, steps: 20000, nodes: 4096, text: 200, prompt: 8000, sound: 600, side: 64, pixels: 2048 };
const SOURCES = ["drafted", "relaxed", "resampled", "bonus"];

function fail(message) {
  throw new Error(message);
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function list(value, what, most) {
  if (!Array.isArray(value)) fail(`${what} is not a list`);
  if (value.length > most) fail(`${what} has ${value.length} entries; the limit is ${most}`);
  return value;
}

function number(value, what, low, high) {
  if (typeof value !== "number" || !(value >= low && value <= high)) fail(`${what} is not from ${low} to ${high}`);
  return value;
}

function whole(value, what, low, high) {
  if (!Number.isInteger(value)) fail(`${what} is not a whole number`);
  return number(value, what, low, high);
}

function text(value, what, most) {
  if (value === undefined || value === null) return "";
  if (typeof value !== "string") fail(`${what} is not a text`);
  if (value.length > most) fail(`${what} is longer than ${most} characters`);
  return value;
}

// Control characters and those that change the direction of writing are shown as their code.
function visible(value) {
  // eslint-disable-next-line no-control-regex
  return value.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]/g,
    (one) => `⟨${one.charCodeAt(0).toString(16).toUpperCase()}⟩`);
}

// ---- files

// A recording {kind: "recording", ...} or a summary {kind: "summary", ...}; raises an Error with a sentence.
function readFile(content) {
  if (content.length > LIMITS.bytes) fail(`the file is larger than ${LIMITS.bytes / 1e6} MB`);
  let values = null;
  try {
    values = [JSON.parse(content)];
  } catch {
    values = content.split("\n").map(parsedLine).filter((one) => one !== null);
  }
  if (!values.length) fail("the file is not JSON");
  if (Array.isArray(values[0])) values = values[0];
  for (const value of values) {
    const found = isObject(value) ? recognise(value) : null;
    if (found) return found;
  }
  return fail(
    "not a trace: expected one of Outrider, a response of vLLM (with per-request spec-decode metrics), SGLang or " +
      "llama.cpp's server, or a record of AIPerf"
  );
}

function parsedLine(line) {
  try {
    return JSON.parse(line.replace(/^data:/, ""));
  } catch {
    return null;
  }
}

function recognise(value) {
  if ("recording" in value && isObject(value.trace)) return readRecording(value, true);
  if (Array.isArray(value.steps) && "schema" in value) return readRecording({ trace: value }, false);
  if ("acceptance" in value) return readSummary(value);
  return readEngine(value);
}

function readRecording(value, hasPlain) {
  const trace = readTrace(value.trace);
  const options = trace.options;
  const modality = value.modality || ("guidance_scale" in options ? "image" : "speed" in options ? "speech" : "text");
  if (!["text", "image", "speech"].includes(modality)) fail(`the modality is unknown`);
  const names = new Map();
  for (const [id, name] of Object.entries(isObject(value.names) ? value.names : {})) {
    names.set(Number(id), visible(text(name, `the text of token ${id.slice(0, 12)}`, LIMITS.text)));
  }
  const found = {
    kind: "recording",
    modality,
    trace,
    names,
    prompt: visible(text(value.prompt, "the prompt", LIMITS.prompt)),
    text: visible(text(options.text, "the text", 20000)),
    rows: whole(value.rows ?? 16, "the image's height", 1, LIMITS.side),
    columns: whole(value.columns ?? 16, "the image's width", 1, LIMITS.side),
    picture: readPicture(value.picture),
    sound: readSound(value.sound),
    starts: list(value.starts ?? [], "starts", 200000).map((one) => number(one, "a start", 0, LIMITS.sound)),
    words: list(value.words ?? [], "words", 20000).map((one) => [
      number(list(one, "a word", 2)[0], "a word's start", 0, LIMITS.sound),
      visible(text(one[1], "a word", LIMITS.text)),
    ]),
    timings: list(value.seconds ?? [], "seconds", 100).map((one) => number(one, "a timing", 0, 1e9)),
    plain: null,
  };
  if (hasPlain && isObject(value.plain)) found.plain = readRecording(value.plain, false);
  return found;
}

function base64(value, what, start) {
  const data = text(value, what, LIMITS.bytes);
  if (data && !(data.startsWith(start) && /^[A-Za-z0-9+/]+={0,2}$/.test(data))) fail(`${what} is not of the kind it says`);
  return data;
}

function readPicture(value) {
  const data = base64(value, "the picture", "iVBORw0KGgo"); // the first bytes of a PNG file
  if (!data) return "";
  const header = atob(data.slice(0, 32));
  const side = (at) => [0, 1, 2, 3].reduce((sum, i) => sum * 256 + header.charCodeAt(at + i), 0);
  for (const at of [16, 20]) whole(side(at), "a side of the picture", 1, LIMITS.pixels);
  return data;
}

function readSound(value) {
  return base64(value, "the sound", "UklGR"); // RIFF
}

// ---- traces

function readTrace(value) {
  if (!isObject(value)) fail("the trace is not an object");
  if (value.schema !== 1) fail(`the trace has schema ${String(value.schema).slice(0, 12)}; this page reads schema 1`);
  const steps = list(value.steps, "steps", LIMITS.steps).map(readStep);
  if (!steps.length) fail("the trace has no steps, so there is nothing to show");
  const plainText = (name) => visible(text(value[name] ?? "", name, 200));
  const seed = Array.isArray(value.seed) ? value.seed.filter(Number.isSafeInteger) : value.seed;
  const options = {};
  for (const source of [value.options, value.machine]) {
    for (const [key, one] of Object.entries(isObject(source) ? source : {}).slice(0, 100)) options[key] = one;
  }
  return { steps, seed, options, method: plainText("method"), rule: plainText("rule"), lossless: value.lossless !== false };
}

function readStep(value, order) {
  if (!isObject(value)) fail(`step ${order + 1} is not an object`);
  const where = `step ${order + 1}`;
  const numbers = (name, length, low, high) => {
    const found = list(value[name] ?? [], `${where}: ${name}`, LIMITS.nodes);
    if (length !== null && found.length !== length && found.length !== 0) fail(`${where}: ${name} has another length`);
    return found.map((one) => number(one, `${where}: ${name}`, low, high));
  };
  const drafted = numbers("drafted", null, -1, 2 ** 31);
  const nodes = drafted.length;
  const parents = numbers("parents", nodes, -1, nodes);
  const emitted = numbers("emitted", null, -1, 2 ** 31);
  const path = numbers("path", null, 0, Math.max(nodes - 1, 0));
  const flags = (name) => list(value[name] ?? [], `${where}: ${name}`, LIMITS.nodes).map((one) => one === true);
  const step = {
    row: whole(value.row ?? 0, `${where}: row`, 0, 2 ** 31),
    index: whole(value.index ?? order, `${where}: index`, 0, 2 ** 31),
    drafted, parents, emitted, path,
    fixed: flags("fixed"),
    tried: flags("tried"),
    chance: numbers("chance", nodes, -0.01, 1.01),
    p: numbers("p", nodes, -0.01, 1.01),
    q: numbers("q", nodes, -0.01, 1.01),
    sources: list(value.sources ?? [], `${where}: sources`, LIMITS.nodes),
    variation: numbers("total_variation", emitted.length, -0.01, 1.01),
    entropy: numbers("entropy", emitted.length, -1, 100),
    alternatives: list(value.alternatives ?? [], `${where}: alternatives`, LIMITS.nodes).map((all) =>
      list(all, `${where}: alternatives`, 1000).slice(0, 8).map((pair) => [
        number(list(pair, "an alternative", 2)[0], "an alternative", -1, 2 ** 31),
        number(pair[1], "an alternative's probability", -0.01, 1.01),
      ])),
    finish: text(value.finish, `${where}: finish`, 20),
    note: visible(text(value.note, `${where}: note`, 1000)),
    seconds: 0,
  };
  for (const [name, spent] of Object.entries(isObject(value.times) ? value.times : {})) {
    step.seconds += number(spent, `${where}: times: ${name.slice(0, 12)}`, 0, 1e9);
  }
  const right = parents.length === nodes && step.fixed.length === nodes && step.tried.length === nodes &&
    parents.every((parent, node) => Number.isInteger(parent) && parent < node) &&
    path.every((node, level) => Number.isInteger(node) && parents[node] === (level ? path[level - 1] : -1)) &&
    path.length <= emitted.length && step.sources.length === emitted.length &&
    step.sources.every((one) => SOURCES.includes(one)) &&
    (step.chance.length === step.p.length && step.p.length === step.q.length) &&
    (step.alternatives.length === 0 || step.alternatives.length === emitted.length);
  if (!right) fail(`${where} contradicts itself: its lists differ in length or point outside the draft`);
  return step;
}

// ---- summaries

function readSummary(value) {
  const count = (name) =>
    value[name] === null || value[name] === undefined ? null : whole(value[name], name, 0, 2 ** 31);
  const histogram = value.histogram ?? null;
  return {
    kind: "summary",
    engine: visible(text(value.engine, "engine", 200)) || "an engine",
    prompt: visible(text(value.prompt, "the prompt", LIMITS.prompt)),
    text: visible(text(value.text, "the text", 20000)),
    passes: count("passes"), drafted: count("drafted"), accepted: count("accepted"), tokens: count("tokens"),
    longest: count("longest"),
    seconds: value.seconds === null || value.seconds === undefined ? null : number(value.seconds, "seconds", 0, 1e9),
    histogram: histogram && list(histogram, "histogram", 10001).map((one) => whole(one, "histogram", 0, 2 ** 31)),
  };
}
