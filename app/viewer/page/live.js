// The live part of a page that was written with a model beside it (`outrider trace live`): a prompt is decoded by a worker in
// this browser, with guesses and then plainly, and each step is shown as those of a recording are.

const LIVE = {
  prompt: "Copy this text: The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog.",
  drafters: { "prompt-lookup": "prompt lookup", suffix: "suffix automaton" },
};
const live = { worker: null, settings: null, names: {}, runs: null, asked: null, drawn: 0 };

function startLive() {
  const field = (id, label, input) => el("label", { class: "field", for: id }, el("span", { text: label }), input);
  const drafter = el("select", { id: "live-drafter" }, ...Object.entries(LIVE.drafters).map(([value, text]) => el("option", { value, text })));
  const panel = el("section", { id: "live", "aria-labelledby": "live-title" },
    el("h2", { id: "live-title", text: "Decode in this browser" }),
    field("live-prompt", "Prompt", el("textarea", { id: "live-prompt", rows: 3, maxlength: 4000, text: LIVE.prompt })),
    el("div", { class: "tools" },
      field("live-drafter", "Guesses by", drafter),
      field("live-tokens", "Tokens", el("input", { id: "live-tokens", type: "number", min: 1, max: 512, value: 48 })),
      el("button", { id: "live-run", type: "button", click: askLive, text: "Load the model" }),
      el("button", { id: "live-stop", type: "button", disabled: true, click: () => live.worker.postMessage({ kind: "stop" }), text: "Stop" }),
      el("button", { id: "live-save", type: "button", disabled: true, click: saveLive, text: "Save the trace" })),
    el("p", { class: "note", text: "The suffix automaton remembers its answers until the page is left, so it guesses a repeated prompt better." }),
    el("p", { id: "live-status", role: "status" }),
    el("table", { id: "live-clocks", hidden: true }));
  $("stage").prepend(panel);
}

function liveBusy(busy) {
  for (const id of ["live-run", "live-drafter"]) $(id).disabled = busy;
  $("live-stop").disabled = !busy || live.settings === null;
  $("live-save").disabled = busy || !live.runs?.main.length;
}

function askLive() {
  liveBusy(true);
  if (live.settings === null) {
    if (live.worker !== null) live.worker.terminate();
    live.worker = new Worker("live-worker.js", { type: "module" });
    live.worker.addEventListener("message", ({ data }) => LIVE_MESSAGES[data.kind](data));
    live.worker.addEventListener("error", () => LIVE_MESSAGES.error({ text: "the worker could not start; serve the folder over HTTP" }));
    live.worker.postMessage({ kind: "load" });
    return;
  }
  const tokens = Math.min(Math.max(Math.round(Number($("live-tokens").value)) || 1, 1), 512);
  Object.assign(live, { names: {}, runs: { main: [], plain: [] }, asked: { prompt: $("live-prompt").value, drafter: $("live-drafter").value, tokens } });
  $("live-clocks").hidden = true;
  $("live-status").textContent = "Reading the prompt …";
  live.worker.postMessage({ kind: "run", ...live.asked });
}

const LIVE_MESSAGES = {
  progress({ read }) {
    $("live-status").textContent = read < 1 ? `Reading the model: ${Math.round(100 * read)} %` : "Preparing the model …";
  },
  loaded({ settings, seconds, threads }) {
    live.settings = settings;
    $("live-status").textContent = `${settings.model} is loaded (${seconds.toFixed(1)} s, ${threads} ${threads === 1 ? "thread" : "threads"}).`;
    $("live-run").textContent = "Decode";
    liveBusy(false);
  },
  step({ run, step, names }) {
    for (const [id, name] of names) live.names[id] = name;
    live.runs[run].push(step);
    $("live-status").textContent = run === "main" ? "Decoding with guesses …" : "Decoding plainly, to compare …";
    showLive(run);
  },
  done({ stopped, same, differs }) {
    if (live.runs.main.length) showLive("main");
    liveBusy(false);
    $("live-status").textContent = stopped ? "Stopped." : same
      ? "The same text, token for token, with guesses and without."
      : `The texts differ from token ${differs + 1} on: two tokens were so close there that rounding decided.`;
    $("live").dataset.same = String(same);
  },
  error({ text: problem }) {
    liveBusy(false);
    $("live-status").textContent = visible(problem.slice(0, 500));
  },
};

// What there is of the runs, as a recording.
function liveRecording() {
  const { settings, asked, runs } = live;
  const trace = (method, steps) => ({
    schema: 1, steps, method, rule: "exact", lossless: true, seed: 0, options: { model: settings.model, temperature: 0, max_new_tokens: asked.tokens },
  });
  const made = { recording: 1, modality: "text", prompt: asked.prompt, names: live.names, trace: trace(asked.drafter, runs.main) };
  if (runs.plain.length) made.plain = { modality: "text", names: live.names, trace: trace("plain", runs.plain) };
  return made;
}

function saveLive() {
  const address = URL.createObjectURL(new Blob([JSON.stringify(liveRecording())], { type: "application/json" }));
  el("a", { href: address, download: "trace.json" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// Open it at the last step of one of the runs.
function showLive(run) {
  const { asked, runs } = live, { view } = state;
  if (!openText(JSON.stringify(liveRecording()), "decoded here", "live")) return;
  state.run = run === "plain" && state.file.plain ? "plain" : "main";
  state.view = runs.main.length > 1 ? view : "guesses";
  go(steps().length - 1);
  const rows = [["guesses", asked.drafter, runs.main], ["plain", "plain decoding", runs.plain]].filter(([, , steps]) => steps.length);
  $("live-clocks").hidden = false;
  $("live-clocks").replaceChildren(
    el("tr", {}, ...["", "tokens", "target passes", "tokens per target pass", "seconds", "tokens per second"].map((text) => el("th", { scope: "col", text }))),
    ...rows.map(([key, name, steps]) => {
      const tokens = steps.reduce((sum, step) => sum + step.emitted.length, 0);
      const seconds = steps.reduce((sum, { times }) => sum + times.draft + times.score + times.rule + times.rest, 0);
      const cells = [tokens, steps.length, (tokens / steps.length).toFixed(2), seconds.toFixed(2), (tokens / seconds).toFixed(1)];
      return el("tr", { id: `live-${key}` }, el("th", { scope: "row", text: name }), ...cells.map((text) => el("td", { text })));
    }));
}
