// The worker of the live page: loads the runtime, the tokenizer and the model from its own folder, and decodes on request.
// Messages to it: {kind: "load"}, {kind: "run", prompt, drafter, tokens}, {kind: "stop"}. Messages from it: "progress",
// "loaded", "step", "done" and "error".

import { Automaton, DRAFTERS } from "./live-drafters.js";
import { Model, decode, dequantized } from "./live-model.js";
import { Tokenizer } from "./tokenizers.mjs";
import * as ort from "./ort.mjs";

const state = { settings: null, tokenizer: null, model: null, past: new Automaton(), stopped: false, known: new Set() };
let turn = Promise.resolve();

async function bytes(name, report) {
  const reply = await fetch(name);
  if (!reply.ok) throw new Error(`${name}: the server answered ${reply.status}`);
  const parts = [], reader = reply.body.getReader();
  let size = 0;
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    parts.push(read.value);
    size += read.value.length;
    if (report) report(size);
  }
  const all = new Uint8Array(size);
  parts.reduce((at, part) => { all.set(part, at); return at + part.length; }, 0);
  if (all[0] !== 0x1f || all[1] !== 0x8b) return all; // not compressed, or the browser has unpacked it
  return new Uint8Array(await new Response(new Blob([all]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer());
}

async function json(name) {
  return JSON.parse(new TextDecoder().decode(await bytes(name)));
}

async function load() {
  const start = performance.now();
  const settings = await json("live.json");
  state.tokenizer = new Tokenizer(await json("tokenizer.json.gz"), {});
  ort.env.wasm.wasmBinary = (await bytes("ort.wasm.gz")).buffer;
  ort.env.wasm.numThreads = self.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency || 1) : 1;
  const weights = await bytes("weights.bin", (size) => postMessage({ kind: "progress", read: size / settings.bytes }));
  postMessage({ kind: "progress", read: 1 });
  const externalData = dequantized(weights, settings);
  const session = await ort.InferenceSession.create(await bytes("model.onnx"), { executionProviders: ["wasm"], externalData });
  state.settings = settings;
  state.model = new Model(ort, session, settings);
  const seconds = (performance.now() - start) / 1000;
  postMessage({ kind: "loaded", settings, seconds, threads: ort.env.wasm.numThreads });
}

function names(ids) {
  const fresh = ids.filter((id) => !state.known.has(id));
  for (const id of fresh) state.known.add(id);
  return fresh.map((id) => [id, state.tokenizer.decode([id], { skip_special_tokens: false }).slice(0, 200)]);
}

async function run({ prompt, drafter, tokens }) {
  const { settings, model, tokenizer } = state;
  const ids = tokenizer.encode(settings.before + prompt + settings.after, { add_special_tokens: settings.special }).ids;
  const limit = Math.min(tokens, settings.positions - ids.length - 20);
  if (!ids.length) throw new Error("the prompt is empty");
  if (limit < 1) throw new Error(`the prompt has ${ids.length} tokens; there is room for ${settings.positions - 21}`);
  Object.assign(state, { stopped: false, known: new Set() });
  const proceed = async () => {
    await new Promise((resolve) => setTimeout(resolve)); // so that a request to stop is read
    return !state.stopped;
  };
  const outputs = {};
  for (const name of ["main", "plain"]) { // with guesses, then without
    const made = name === "main" ? DRAFTERS[drafter](ids, state.past) : null;
    const report = (step) => postMessage({ kind: "step", run: name, step, names: names([...step.drafted, ...step.emitted]) });
    outputs[name] = await decode(model, ids, { drafter: made, end: settings.end, limit, report, proceed });
    if (state.stopped) break;
  }
  if (drafter === "suffix") state.past.remember(outputs.main);
  const whole = outputs.plain !== undefined && !state.stopped;
  const differs = whole ? outputs.main.findIndex((token, place) => token !== outputs.plain[place]) : null;
  const same = whole ? differs < 0 && outputs.main.length === outputs.plain.length : null;
  postMessage({ kind: "done", stopped: state.stopped, same, differs });
}

self.addEventListener("message", ({ data }) => {
  if (data.kind === "stop") state.stopped = true;
  else turn = turn.then(() => (data.kind === "load" ? load() : run(data))).catch((problem) => postMessage({ kind: "error", text: String(problem.message ?? problem) }));
});
