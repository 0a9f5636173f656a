// Draws pictures, as grids of codes with one overlay, and speech, as a strip of tokens under its sound.

const OVERLAYS = {
  source: "Who wrote it", pass: "Target pass", chance: "Probability of acceptance", entropy: "Entropy", none: "Picture only",
};
const RAMP = [[0, 32, 77], [65, 77, 107], [124, 123, 120], [188, 175, 111], [255, 234, 70]]; // cividis

function ramp(share) {
  const at = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1);
  const low = Math.min(Math.floor(at), RAMP.length - 2);
  return `rgb(${RAMP[low].map((one, i) => Math.round(one + (RAMP[low + 1][i] - one) * (at - low))).join(" ")})`;
}

function codeValue(step, level, overlay) {
  if (overlay === "pass") return step.index + 1;
  if (overlay === "entropy") return step.entropy[level] ?? null;
  const node = step.path[level];
  if (overlay === "chance") return node === undefined || !step.chance.length ? null : step.chance[node];
  return null;
}

// The grid of codes up to the current step; each code opens its card.
function drawPicture(recording, steps, current, overlay, open) {
  const count = recording.rows * recording.columns;
  const codes = steps.flatMap((step, order) => step.emitted.map((token, level) => ({ step, order, token, level }))).slice(0, count);
  const values = codes.map(({ step, level }) => codeValue(step, level, overlay)).filter((one) => one !== null);
  const top = overlay === "chance" ? 1 : Math.max(1e-9, ...values);
  const grid = el("div", { class: `codes overlay-${overlay}`, role: "group", "aria-label": "The codes of the picture, row by row" });
  grid.style.gridTemplateColumns = `repeat(${recording.columns}, 1fr)`;
  for (let cell = 0; cell < count; cell += 1) {
    const code = codes[cell];
    if (!code || code.order > current) {
      grid.append(el("span", { class: "code veil", "aria-hidden": "true" }));
      continue;
    }
    const { step, token, level } = code;
    const kind = step.sources[level];
    const part = [kind, token, step.path[level] ?? null, level];
    const made = el("span", {
      class: `code ${kind}${isTarget(kind) ? " target" : ""}${code.order === current ? " now" : ""}`,
      role: "button", tabindex: "-1", click: () => open(step, part),
    });
    const value = codeValue(step, level, overlay);
    if (value !== null) made.style.backgroundColor = ramp(value / top);
    const where = `row ${Math.floor(cell / recording.columns) + 1}, column ${(cell % recording.columns) + 1}`;
    made.setAttribute("aria-label", `${where}: ${KINDS[kind].name}, pass ${step.index + 1}${value === null ? "" : `, ${value.toFixed(2)}`}`);
    grid.append(made);
  }
  const frame = el("div", { class: "frame" });
  frame.style.aspectRatio = `${recording.columns} / ${recording.rows}`;
  if (recording.picture) {
    const image = el("img", { alt: recording.prompt ? `The picture: ${recording.prompt}` : "The picture" });
    image.src = `data:image/png;base64,${recording.picture}`;
    frame.append(image);
  }
  frame.append(roving(grid, ".code:not(.veil)", recording.columns));
  const parts = [frame];
  if (["pass", "chance", "entropy"].includes(overlay)) {
    parts.push(el("div", { class: "scale" }, el("span", { text: "0" }), el("div", { class: "ramp" }),
      el("span", { text: overlay === "pass" ? String(top) : top.toFixed(top < 10 ? 1 : 0) })));
  }
  return parts;
}

// ---- speech

// Peaks of a WAV file with 16-bit samples: [seconds, numbers from 0 to 1]; nothing for other files.
function peaks(sound, count) {
  const bytes = Uint8Array.from(atob(sound), (one) => one.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  let at = 12, rate = 0, channels = 0, bits = 0;
  while (at + 8 <= bytes.length) {
    const name = String.fromCharCode(...bytes.subarray(at, at + 4));
    const size = view.getUint32(at + 4, true);
    if (name === "fmt " && at + 24 <= bytes.length) {
      channels = view.getUint16(at + 10, true);
      rate = view.getUint32(at + 12, true);
      bits = view.getUint16(at + 22, true);
    }
    if (name === "data") {
      if (bits !== 16 || !rate || !channels) return [0, []];
      const frames = Math.floor(Math.min(size, bytes.length - at - 8) / 2 / channels);
      const found = Array(count).fill(0);
      for (let frame = 0; frame < frames; frame += 1) {
        const slot = Math.floor((frame * count) / frames);
        const value = Math.abs(view.getInt16(at + 8 + 2 * channels * frame, true)) / 32768;
        if (value > found[slot]) found[slot] = value;
      }
      return [frames / rate, found];
    }
    at += 8 + size + (size % 2);
  }
  return [0, []];
}

function drawSpeech(recording, steps, current, open) {
  const count = steps.reduce((sum, step) => sum + step.emitted.length, 0);
  const starts = recording.starts.length === count ? recording.starts : Array.from({ length: count }, (_, i) => i / 43.07);
  const [length, wave] = recording.sound ? peaks(recording.sound, 400) : [0, []];
  const seconds = Math.max(length, (starts[count - 1] ?? 0) + 0.023, 0.1);
  const strip = el("div", { class: "strip", role: "group", "aria-label": "The tokens of the speech, in time" });
  let token = 0;
  steps.forEach((step, order) => step.emitted.forEach((code, level) => {
    const from = starts[token], to = starts[token + 1] ?? seconds;
    token += 1;
    const kind = step.sources[level];
    const part = [kind, code, step.path[level] ?? null, level];
    const shown = order <= current;
    const made = el("span", {
      class: `code ${kind}${isTarget(kind) ? " target" : ""}${order === current ? " now" : ""}${shown ? "" : " later"}`,
      role: "button", tabindex: "-1", click: () => open(step, part),
    });
    made.style.left = `${(100 * from) / seconds}%`;
    made.style.width = `${Math.max((100 * (to - from)) / seconds, 0.1)}%`;
    made.setAttribute("aria-label", `${from.toFixed(2)} seconds, code ${code}: ${KINDS[kind].name}, pass ${step.index + 1}`);
    strip.append(made);
  }));
  const head = el("div", { class: "playhead", "aria-hidden": "true" });
  const canvas = el("canvas", { class: "wave", width: "800", height: "80", "aria-hidden": "true" });
  const words = el("div", { class: "words" }, ...recording.words.slice(0, 400).map(([at, word]) => {
    const made = el("span", { text: word });
    made.style.left = `${(100 * at) / seconds}%`;
    return made;
  }));
  const track = el("div", { class: "track" }, canvas, roving(strip, ".code"), words, head);
  const parts = [el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Timeline of the speech" }, track)];
  track.style.minWidth = `${Math.min(Math.max(count * 6, 280), 20000)}px`;
  if (recording.sound) {
    const audio = el("audio", { controls: true, preload: "metadata", "aria-label": "The speech" });
    audio.src = `data:audio/wav;base64,${recording.sound}`;
    const move = () => {
      head.style.left = `${Math.min((100 * audio.currentTime) / seconds, 100)}%`;
      if (!audio.paused && audio.isConnected) requestAnimationFrame(move);
    };
    for (const name of ["play", "seeked", "timeupdate"]) audio.addEventListener(name, move);
    parts.unshift(audio);
    requestAnimationFrame(() => drawWave(canvas, wave));
  }
  return parts;
}

function drawWave(canvas, wave) {
  const pen = canvas.getContext("2d");
  pen.fillStyle = getComputedStyle(canvas).color;
  wave.forEach((value, i) => {
    const high = Math.max(value * canvas.height, 1);
    pen.fillRect((i * canvas.width) / wave.length, (canvas.height - high) / 2, canvas.width / wave.length - 0.5, high);
  });
}
