// A decoder in the browser: the ONNX graph of outrider.core.engine.quantization.onnx_graph in onnxruntime's WebAssembly, and greedy
// decoding with and without a draft. One pass scores a tree of guesses; the keys and values of the accepted path are
// appended to the past, those of the others are not. Knows neither texts nor the page.

// The matrices of a file of weights (onnx_graph.Blocks) as the graph's external data: transposed, in 32 bits.
export function dequantized(file, { matrices, tied }) {
  const found = [];
  let at = 0;
  const take = (size) => file.slice(at, at += size);
  for (const { name, rows, columns, bits, block } of matrices) {
    const blocks = columns / block;
    const codes = take((rows * columns * bits) / 8), halves = take(2 * rows * blocks);
    const offsets = bits === 4 ? take(rows * blocks) : null;
    if (name === "embedding") found.push({ path: `${name}.codes`, data: codes }, { path: `${name}.scales`, data: halves });
    if (name === "embedding" && !tied) continue;
    const scales = Float32Array.from(new Uint16Array(halves.buffer), single), weights = new Float32Array(rows * columns);
    for (let unit = 0; unit < rows * blocks; unit += 1) {
      const row = Math.floor(unit / blocks), scale = scales[unit], offset = offsets ? offsets[unit] / 16 : 128;
      for (let i = 0, place = unit * block, to = (unit % blocks) * block * rows + row; i < block; i += 1, place += 1, to += rows) {
        const code = bits === 8 ? codes[place] : (codes[place >> 1] >> (4 * (place & 1))) & 15;
        weights[to] = (code - offset) * scale;
      }
    }
    found.push({ path: name === "embedding" ? "head" : name, data: new Uint8Array(weights.buffer) });
  }
  return found;
}

// A number of 16 bits that is not negative, infinite or NaN.
function single(half) {
  const exponent = half >> 10, fraction = half & 1023;
  return exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024);
}

export class Model {
  constructor(ort, session, { layers, width, positions }) {
    Object.assign(this, { ort, session, layers, row: layers * width, width, positions });
    this.stored = new Float32Array(64 * this.row);
    this.length = 0; // tokens of the past
  }

  // Score tokens behind the past: {logits: the likeliest token at each wanted token, keys: rows for the past}.
  async pass(tokens, parents, wanted) {
    const { ort, length } = this, count = tokens.length;
    const columns = length + count, mask = new Uint8Array(count * columns), depths = [];
    tokens.forEach((_, node) => {
      const parent = parents[node];
      mask.fill(1, node * columns, node * columns + length);
      if (parent >= 0) mask.copyWithin(node * columns, parent * columns, parent * columns + columns);
      mask[node * columns + length + node] = 1;
      depths.push(parent < 0 ? 0 : depths[parent] + 1);
    });
    const long = (values) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), [values.length]);
    const found = await this.session.run({
      ids: long(tokens), positions: long(depths.map((depth) => length + depth)),
      mask: new ort.Tensor("bool", mask, [count, columns]),
      past: new ort.Tensor("float32", this.stored.subarray(0, length * this.row), [length, this.layers, this.width]),
      wanted: long(wanted),
    });
    const all = found.logits.data, size = found.logits.dims[1];
    return { best: wanted.map((_, i) => likeliest(all.subarray(i * size, (i + 1) * size))), keys: found.new.data };
  }

  keep(keys, rows) {
    if ((this.length + rows.length) * this.row > this.stored.length) {
      const larger = new Float32Array(2 * (this.length + rows.length) * this.row);
      larger.set(this.stored);
      this.stored = larger;
    }
    for (const row of rows) {
      this.stored.set(keys.subarray(row * this.row, (row + 1) * this.row), this.length * this.row);
      this.length += 1;
    }
  }

  // Read a prompt but for its last token.
  async read(prompt, proceed) {
    this.length = 0;
    for (let start = 0; start < prompt.length - 1; start += 32) {
      const part = prompt.slice(start, Math.min(start + 32, prompt.length - 1));
      const { keys } = await this.pass(part, part.map((_, i) => i - 1), []);
      this.keep(keys, part.map((_, i) => i));
      if (!(await proceed())) return;
    }
  }
}

function likeliest(logits) {
  let best = 0;
  for (let token = 1; token < logits.length; token += 1) if (logits[token] > logits[best]) best = token;
  return best;
}

// Decode greedily: the steps of a trace, each given to `report` when it is done. `drafter`: null for plain decoding.
// `proceed()` says whether to go on.
export async function decode(model, prompt, { drafter, end, limit, report, proceed }) {
  await model.read(prompt, proceed);
  const output = [];
  let root = prompt[prompt.length - 1], finish = null, index = 0;
  while (finish === null && (await proceed())) {
    const start = performance.now();
    const draft = drafter ? drafter.propose(limit - output.length - 1) : { tokens: [], parents: [] };
    const drafted = performance.now();
    const tokens = [root, ...draft.tokens], parents = [-1, ...draft.parents.map((parent) => parent + 1)];
    const { best, keys } = await model.pass(tokens, parents, tokens.map((_, i) => i));
    const scored = performance.now();
    const step = verified(draft, best, output.length, end, limit);
    finish = step.finish;
    step.index = index++;
    model.keep(keys, [0, ...step.path.map((node) => node + 1)]);
    output.push(...step.emitted);
    root = output[output.length - 1];
    if (drafter) drafter.add(step.emitted);
    const done = performance.now();
    step.times = { draft: (drafted - start) / 1000, score: (scored - drafted) / 1000, rule: 0, rest: (done - scored) / 1000 };
    report(step);
  }
  return output;
}

// The step of a draft whose scores are known. A guess is accepted if it is the target's likeliest token.
export function verified(draft, best, before, end, limit) {
  const count = draft.tokens.length, p = Array(count).fill(0), q = Array(count).fill(0), tried = Array(count).fill(false);
  let at = -1, path = [], emitted = [], sources = [], finish = null;
  for (;;) {
    const target = best[at + 1], children = draft.parents.flatMap((parent, node) => (parent === at ? [node] : []));
    for (const node of children) {
      tried[node] = true;
      p[node] = draft.tokens[node] === target ? 1 : 0;
      q[node] = 1;
    }
    const next = children.find((node) => p[node] === 1);
    emitted.push(target);
    if (next !== undefined) path.push(next);
    sources.push(next !== undefined ? "drafted" : children.length ? "resampled" : "bonus");
    finish = end.includes(target) ? "end" : before + emitted.length >= limit ? "limit" : null;
    if (next === undefined || finish !== null) break;
    at = next;
  }
  return {
    row: 0, index: 0, drafted: draft.tokens.slice(), parents: draft.parents.slice(), fixed: Array(count).fill(true), tried,
    chance: p, p, q, path, emitted, sources, total_variation: [], alternatives: [], finish, note: "",
  };
}
