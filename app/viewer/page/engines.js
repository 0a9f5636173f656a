// Reads the responses of vLLM, SGLang and llama.cpp's server and AIPerf's records, as outrider.app.formats.engines does.
// Knows nothing of the page.

function readEngine(value) {
  return readVllm(value) || readSglang(value) || readLlama(value) || readAiperf(value);
}

function within(value, ...names) {
  let found = value;
  for (const name of names) {
    found = Array.isArray(found) ? found[0] : found;
    if (!isObject(found)) return {};
    found = found[name];
  }
  found = Array.isArray(found) ? found[0] : found;
  return isObject(found) ? found : {};
}

function countOf(value, name) {
  return value[name] === null || value[name] === undefined ? null : whole(value[name], name, 0, 2 ** 31 - 1);
}

function countsOf(value, name) {
  if (value[name] === null || value[name] === undefined) return null;
  return list(value[name], name, LIMITS.steps).map((one) => whole(one, name, 0, 2 ** 31 - 1));
}

function textOf(value) {
  const choice = within(value, "choices");
  const all = [within(choice, "message").content, choice.text, value.text, value.content];
  return String(all.find((one) => typeof one === "string") ?? "").slice(0, 20000);
}

function readVllm(value) {
  const found = within(value, "metrics", "speculative_decoding");
  const metrics = "num_spec_steps" in found ? found : value;
  if (!("num_spec_steps" in metrics) || "engine" in metrics || !Array.isArray(metrics.acceptance_histogram)) return null;
  return engineFile({
    engine: "vllm",
    steps: orderedSteps(metrics),
    histogram: countsOf(metrics, "acceptance_histogram"),
    passes: countOf(metrics, "num_spec_steps"),
    drafted: countOf(metrics, "num_draft_tokens"),
    accepted: countOf(metrics, "num_accepted_draft_tokens"),
    longest: countOf(metrics, "num_spec_tokens"),
    tokens: countOf(within(value, "usage"), "completion_tokens"),
    text: textOf(value),
    pieces: piecesOf(within(value, "choices")),
  });
}

function orderedSteps(metrics) {
  const accepted = countsOf(metrics, "per_step_accepted");
  const drafted = countsOf(metrics, "per_step_drafted");
  if (!accepted || !drafted) return null;
  if (accepted.length !== drafted.length) fail("per_step_accepted and per_step_drafted differ in length");
  return accepted.map((kept, i) => (kept <= drafted[i] ? [drafted[i], kept] : fail("a step accepted more than it drafted")));
}

function piecesOf(choice) {
  const logprobs = within(choice, "logprobs");
  const texts = Array.isArray(logprobs.content)
    ? logprobs.content.map((one) => (isObject(one) ? one.token : ""))
    : Array.isArray(logprobs.tokens) ? logprobs.tokens : [];
  if (!Array.isArray(choice.token_ids) || choice.token_ids.length !== texts.length) return [];
  return choice.token_ids.map((id, i) => [
    whole(id, "a token", 0, 2 ** 31 - 1), typeof texts[i] === "string" ? texts[i] : "",
  ]);
}

function readSglang(value) {
  const meta = [within(value, "meta_info"), within(value, "choices", "meta_info"), value]
    .find((one) => "spec_verify_ct" in one);
  if (!meta) return null;
  return engineFile({
    engine: "sglang",
    steps: null,
    histogram: countsOf(meta, "spec_correct_drafts_histogram") || countsOf(meta, "spec_accept_histogram"),
    passes: countOf(meta, "spec_verify_ct"),
    drafted: countOf(meta, "spec_num_proposed_drafts") ?? countOf(meta, "spec_draft_token_num"),
    accepted: countOf(meta, "spec_num_correct_drafts") ?? countOf(meta, "spec_accept_token_num"),
    tokens: countOf(meta, "completion_tokens"),
    text: textOf(value),
  });
}

function readLlama(value) {
  const timings = within(value, "timings");
  if (!("predicted_n" in timings)) return null;
  const tokens = countOf(timings, "predicted_n");
  const accepted = countOf(timings, "draft_n_accepted") ?? 0;
  if (tokens === null || accepted > tokens) fail("llama.cpp: draft_n_accepted is larger than predicted_n");
  return engineFile({
    engine: "llama.cpp",
    steps: null,
    histogram: null,
    passes: tokens - accepted, // each pass emits the accepted tokens and one more
    drafted: countOf(timings, "draft_n") ?? 0,
    accepted,
    tokens,
    seconds: typeof timings.predicted_ms === "number" ? timings.predicted_ms / 1000 : null,
    prompt: typeof value.prompt === "string" ? value.prompt.slice(0, LIMITS.prompt) : "",
    text: textOf(value),
  });
}

function readAiperf(value) {
  const found = within(value, "spec_decode_acceptance");
  const record = "num_spec_steps" in found ? found : value;
  if (!("num_spec_steps" in record) || !isObject(record.acceptance_histogram) || typeof record.engine !== "string") return null;
  const histogram = [];
  for (const [key, count] of Object.entries(record.acceptance_histogram)) {
    if (!/^\d{1,4}$/.test(key)) fail("AIPerf: acceptance_histogram has a key that is no small number");
    histogram[Number(key)] = whole(count, "acceptance_histogram", 0, 2 ** 31 - 1);
  }
  return engineFile({
    engine: record.engine.slice(0, 60),
    steps: orderedSteps(record),
    histogram: Array.from(histogram, (one) => one ?? 0),
    passes: countOf(record, "num_spec_steps"),
    drafted: countOf(record, "num_draft_tokens"),
    accepted: countOf(record, "num_accepted_draft_tokens"),
    longest: countOf(record, "num_spec_tokens"),
    tokens: countOf(record, "completion_tokens"),
  });
}

// A recording where steps were reported in order, else a summary.
function engineFile(found) {
  if (!found.steps) return readSummary({ acceptance: 1, ...found });
  const before = 1 + found.steps.slice(0, -1).reduce((sum, [, kept]) => sum + kept + 1, 0);
  const last = found.steps.length ? found.steps[found.steps.length - 1][1] + 1 : 0;
  const placed = found.tokens !== null && (last ? before < found.tokens && found.tokens <= before + last : found.tokens === before);
  const total = placed ? found.tokens : before + last;
  const pieces = found.pieces ?? [];
  const known = placed && pieces.length === found.tokens;
  const ids = known ? pieces.map(([id]) => id) : Array(Math.min(total, 1e6)).fill(-1);
  let at = 0;
  const steps = [[0, 0], ...found.steps].map(([drafted, kept], index) => {
    const emitted = ids.slice(at, at + kept + 1);
    at += emitted.length;
    const reached = Math.min(kept, emitted.length);
    const own = kept < drafted ? "resampled" : "bonus";
    return {
      row: 0, index, emitted,
      drafted: Array.from({ length: drafted }, (_, i) => (i < reached ? emitted[i] : -1)),
      parents: Array.from({ length: drafted }, (_, i) => i - 1),
      fixed: Array(drafted).fill(false),
      tried: Array.from({ length: drafted }, (_, i) => i <= kept),
      path: Array.from({ length: reached }, (_, i) => i),
      sources: [...Array(kept).fill("drafted"), own].slice(0, emitted.length),
    };
  });
  const options = { engine: found.engine, tokens_without_a_place: placed || found.tokens === null ? 0 : Math.max(found.tokens - total, 0) };
  if (found.text && !known) options.text = found.text;
  const trace = { schema: 1, steps, method: found.engine, rule: "exact", options };
  return readRecording({ trace, modality: "text", names: Object.fromEntries(pieces.map(([id, name]) => [id, name.slice(0, LIMITS.text)])), prompt: found.prompt }, false);
}
