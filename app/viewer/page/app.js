// The page: opens recordings, steps through them, follows links and the narration. All state is in `state`.

const $ = (id) => document.getElementById(id);
const VIEWS = ["read", "who", "guesses"];
const HASH_MOST = 2000; // characters of an address in a link
const state = {
  file: null, name: "", link: "", dice: null, run: "main", row: 0, step: 0, view: "read", overlay: "source", speed: 1,
  timer: null, chapter: 0, paragraph: 0,
};

function embedded(id) {
  const found = document.getElementById(id);
  return found ? found.textContent : null;
}

const bundled = JSON.parse(embedded("titles")); // name -> title
const chapters = JSON.parse(embedded("chapters"));

// ---- opening

function report(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

function openText(content, name, link) {
  let file = null;
  try {
    file = readFile(content);
  } catch (problem) {
    report(`${name}: ${problem.message}`);
    return false;
  }
  report("");
  pause();
  Object.assign(state, { file, name, link, run: "main", row: 0, step: 0 });
  state.dice = file.kind === "recording" ? dicePlan(file.trace) : null;
  $("pick").value = name in bundled ? name : "";
  show();
  return true;
}

function openBundled(name) {
  if (state.name === name && state.link === "bundled") return true;
  const content = Object.hasOwn(bundled, name) ? embedded(`recording-${name}`) : null;
  if (content === null) {
    report(`There is no recording ${visible(name.slice(0, 60))}.`);
    return false;
  }
  return openText(content, name, "bundled");
}

async function openFile(file) {
  if (file.size > LIMITS.bytes) return report(`${visible(file.name)}: larger than ${LIMITS.bytes / 1e6} MB`);
  openText(await file.text(), visible(file.name.slice(0, 120)), "file");
  return show();
}

async function openAddress(address) {
  try {
    const url = new URL(address, location.href);
    if (!["http:", "https:"].includes(url.protocol)) throw new Error("only http and https addresses are opened");
    const reply = await fetch(url, { credentials: "omit" });
    if (!reply.ok) throw new Error(`the server answered ${reply.status}`);
    if (Number(reply.headers.get("content-length") ?? 0) > LIMITS.bytes) throw new Error("the file is too large");
    return openText(await reply.text(), visible(url.pathname.split("/").pop().slice(0, 120)), address);
  } catch (problem) {
    report(`${visible(address.slice(0, 200))}: ${problem.message}. The server must allow other origins (CORS).`);
    return false;
  }
}

// ---- state

function recording() {
  return state.run === "plain" && state.file.plain ? state.file.plain : state.file;
}

function steps() {
  const all = recording().trace.steps;
  const rows = [...new Set(all.map((step) => step.row))];
  return rows.length > 1 ? all.filter((step) => step.row === rows[Math.min(state.row, rows.length - 1)]) : all;
}

function go(step, quiet) {
  if (!state.file || state.file.kind !== "recording") return;
  const most = steps().length - 1;
  const to = Math.min(Math.max(step, 0), most);
  if (to === state.step && quiet) return;
  state.step = to;
  if (to === most) pause();
  show();
}

function pause() {
  clearInterval(state.timer);
  state.timer = null;
  $("play").textContent = "Play";
}

function play() {
  if (state.timer) return pause();
  if (state.step >= steps().length - 1) state.step = -1;
  $("play").textContent = "Pause";
  const advance = () => go(state.step + 1);
  state.timer = setInterval(advance, 1000 / state.speed);
  return advance();
}

// ---- drawing

function show() {
  const file = state.file;
  const isRecording = file !== null && file.kind === "recording";
  for (const id of ["stepper", "views", "this-step"]) $(id).hidden = !isRecording;
  if (file === null) return;
  $("title").textContent = bundled[state.name] ?? state.name;
  $("prompt").textContent = file.prompt ? `Prompt: ${file.prompt}` : "";
  if (!isRecording) {
    $("facts").textContent = "";
    $("sentence").textContent = "";
    $("output").replaceChildren(...drawSummary(file));
    return;
  }
  const shown = recording(), all = steps();
  const step = all[state.step];
  $("facts").textContent = headline(shown, all);
  const rule = shown.trace.rule ? `rule ${shown.trace.rule}, ${shown.trace.lossless ? "lossless" : "relaxed"}` : "";
  const settings = [shown.trace.method, rule, shown.trace.options.model, `temperature ${shown.trace.options.temperature}`];
  $("settings").textContent = settings.filter((one) => typeof one === "string" && one && !one.endsWith("undefined")).map((one) => visible(one.slice(0, 120))).join(" · ");
  for (const [id, on] of [["runs", state.file.plain], ["views-text", shown.modality === "text"], ["views-image", shown.modality === "image"]]) $(id).hidden = !on;
  $("legend").hidden = shown.modality === "text" && state.view === "read";
  $("legend-guesses").hidden = shown.modality === "text" && state.view !== "guesses";
  drawRows(shown);
  const drawn = shown.modality === "image" ? drawPicture(shown, all, state.step, state.overlay, card)
    : shown.modality === "speech" ? drawSpeechOnce(shown, all) : [drawText(shown, all, state.step, state.view, card)];
  if (drawn) $("output").replaceChildren(...drawn);
  $("position").max = String(all.length - 1);
  $("position").value = String(state.step);
  $("position").setAttribute("aria-valuetext", `step ${state.step + 1} of ${all.length}`);
  $("count").textContent = `${state.step + 1} / ${all.length}`;
  $("back").disabled = state.step === 0;
  $("next").disabled = state.step === all.length - 1;
  $("sentence").textContent = sentence(shown, step);
  $("draft").replaceChildren(...(step.drafted.length ? drawDraft(shown, step, card) : [el("p", { class: "note", text: "No draft in this step." })]));
  $("note").textContent = step.note ? `The drafter says: ${step.note}` : "";
  for (const [name, value] of [["run", state.run], ["view", state.view]]) {
    const input = document.querySelector(`input[name=${name}][value=${value}]`);
    if (input) input.checked = true;
  }
  $("overlay").value = state.overlay;
  remember();
}

let spoken = null; // the recording whose sound is on the page: a new player would stop the sound

function drawSpeechOnce(shown, all) {
  const output = $("output");
  if (spoken !== shown || !output.querySelector(".strip")) {
    spoken = shown;
    return drawSpeech(shown, all, state.step, card);
  }
  const fresh = drawSpeech({ ...shown, sound: "" }, all, state.step, card)[0].querySelector(".strip");
  output.querySelector(".strip").replaceWith(fresh);
  return null;
}

function drawRows(shown) {
  const rows = [...new Set(shown.trace.steps.map((step) => step.row))];
  $("rows").hidden = rows.length < 2;
  if (rows.length > 1 && $("row").options.length !== rows.length) {
    $("row").replaceChildren(...rows.slice(0, 1000).map((row, i) => el("option", { value: i, text: `row ${row + 1}` })));
  }
}

function card(step, part) {
  fillCard($("card"), recording(), step, part, state.run === "main" ? state.dice : null);
  $("card").showModal();
}

// ---- links

function remember() {
  const parts = new URLSearchParams();
  if (state.link === "bundled") parts.set("recording", state.name);
  else if (/^https?:/.test(state.link)) parts.set("trace", state.link);
  else return;
  parts.set("step", String(state.step + 1));
  if (state.run !== "main") parts.set("run", state.run);
  if (state.view !== "read") parts.set("view", state.view);
  history.replaceState(null, "", `#${parts}`);
}

async function follow() {
  const hash = location.hash.slice(1, HASH_MOST);
  const parts = new URLSearchParams(hash);
  if (!hash) return false;
  if (VIEWS.includes(parts.get("view"))) state.view = parts.get("view");
  const opened = parts.has("recording") ? openBundled(parts.get("recording"))
    : parts.has("trace") ? await openAddress(parts.get("trace")) : false;
  if (!opened) return false;
  if (parts.get("run") === "plain" && state.file.plain) state.run = "plain";
  const step = Number.parseInt(parts.get("step") ?? "1", 10);
  go((Number.isFinite(step) ? step : 1) - 1);
  return true;
}

// ---- the narration

function tell(chapter, paragraph, moves) {
  state.chapter = Math.min(Math.max(chapter, 0), chapters.length - 1);
  const all = chapters[state.chapter].paragraphs;
  state.paragraph = Math.min(Math.max(paragraph, 0), all.length - 1);
  $("chapter").value = String(state.chapter);
  $("paragraphs").replaceChildren(...all.map((one, i) => {
    const made = el("button", { type: "button", class: "paragraph", click: () => tell(state.chapter, i, true), text: one.text });
    if (i === state.paragraph) made.setAttribute("aria-current", "step");
    return el("li", {}, made);
  }));
  $("story-back").disabled = state.chapter === 0 && state.paragraph === 0;
  $("story-next").disabled = state.chapter === chapters.length - 1 && state.paragraph === all.length - 1;
  if (!moves) return;
  const to = all[state.paragraph];
  pause();
  if (!openBundled(to.recording)) return;
  state.run = to.run ?? "main";
  state.view = to.view ?? "guesses";
  if (to.overlay) state.overlay = to.overlay;
  state.step = Math.min(to.step - 1, steps().length - 1);
  show();
}

function turn(by) {
  const last = chapters[state.chapter].paragraphs.length - 1;
  const to = state.paragraph + by;
  if (to > last) return tell(state.chapter + 1, 0, true);
  if (to < 0) return tell(state.chapter - 1, Infinity, true);
  return tell(state.chapter, to, true);
}

// ---- events

function listen() {
  const on = (id, name, what) => $(id).addEventListener(name, what);
  on("back", "click", () => go(state.step - 1));
  on("next", "click", () => go(state.step + 1));
  on("play", "click", play);
  on("position", "input", (event) => go(Number(event.target.value), true));
  on("speed", "change", (event) => {
    state.speed = Number(event.target.value);
    if (state.timer) { pause(); play(); }
  });
  on("overlay", "change", (event) => { state.overlay = event.target.value; show(); });
  on("row", "change", (event) => { state.row = Number(event.target.value); state.step = 0; show(); });
  on("pick", "change", (event) => event.target.value && openBundled(event.target.value));
  on("open", "change", (event) => { if (event.target.files[0]) openFile(event.target.files[0]); event.target.value = ""; });
  on("chapter", "change", (event) => tell(Number(event.target.value), 0, true));
  on("story-back", "click", () => turn(-1));
  on("story-next", "click", () => turn(1));
  on("theme", "click", () => {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    show();
  });
  on("card", "click", (event) => event.target === $("card") && $("card").close());
  for (const input of document.querySelectorAll("input[name=view], input[name=run]")) {
    input.addEventListener("change", () => {
      if (input.name === "run") state.step = 0;
      state[input.name] = input.value;
      show();
    });
  }
  document.addEventListener("keydown", keys);
  document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
  document.addEventListener("dragleave", () => document.body.classList.remove("dropping"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    if (event.dataTransfer.files[0]) openFile(event.dataTransfer.files[0]);
  });
  window.addEventListener("hashchange", follow);
  swipes($("output"));
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("card").open) return;
  if (event.target.closest("input, select, textarea, audio, summary")) return;
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (move) go(state.step + move);
  else if (event.key === "Home") go(0);
  else if (event.key === "End") go(Infinity);
  else if (event.key === " " && !event.target.closest("button, a")) play();
  else return;
  event.preventDefault();
}

// A swipe to the left goes on, one to the right goes back.
function swipes(area) {
  let start = null;
  area.addEventListener("touchstart", (event) => { start = event.touches.length === 1 ? event.touches[0] : null; }, { passive: true });
  area.addEventListener("touchend", (event) => {
    if (!start || event.target.closest(".wide")) return;
    const end = event.changedTouches[0];
    const across = end.clientX - start.clientX;
    if (Math.abs(across) > 60 && Math.abs(end.clientY - start.clientY) < 40) go(state.step + (across < 0 ? 1 : -1));
    start = null;
  }, { passive: true });
}

async function begin() {
  for (const [name, title] of Object.entries(bundled)) $("pick").append(el("option", { value: name, text: title }));
  chapters.forEach((chapter, i) => $("chapter").append(el("option", { value: i, text: `${i + 1}. ${chapter.title}` })));
  for (const [name, title] of Object.entries(OVERLAYS)) $("overlay").append(el("option", { value: name, text: title }));
  listen();
  if (typeof startLive === "function") startLive(); // in a page with a model beside it
  const own = embedded("opened");
  if (own !== null) {
    $("story").open = false;
    openText(own, document.getElementById("opened").dataset.name, "opened");
    tell(0, 0, false);
  } else if (await follow()) {
    $("story").open = false;
    tell(0, 0, false);
  } else tell(0, 0, true);
  document.body.dataset.ready = String(Math.round(performance.now()));
}

begin();
