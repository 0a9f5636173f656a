// The drafters of the live page: prompt lookup and the suffix automaton, as outrider.core.drafters.lookup defines them, with
// the same defaults; a test compares their drafts token for token. Knows token ids only. `propose(room)` gives a draft
// {tokens, parents}, parents before children and -1 the last committed token; `add(tokens)` tells what was committed.

export const DRAFTERS = { "prompt-lookup": (prompt, past) => new PromptLookup(prompt), suffix: (prompt, past) => new Suffix(prompt, past) };

function chain(tokens) {
  return { tokens, parents: tokens.map((_, place) => place - 1) };
}

// What followed the last occurrence of the text's longest matching suffix (prompt_lookup.py).
class PromptLookup {
  constructor(prompt, length = 10, maxNgram = 3, minNgram = 1) {
    Object.assign(this, { length, maxNgram, minNgram, tokens: [], indexed: 0 });
    this.next = Array.from({ length: maxNgram }, () => new Map()); // n-gram -> the position after its last occurrence
    this.add(prompt);
  }

  add(tokens) {
    this.tokens.push(...tokens);
    for (let end = this.indexed + 1; end < this.tokens.length; end += 1) { // nothing follows the last token yet
      for (let size = 1; size <= Math.min(this.maxNgram, end); size += 1) this.next[size - 1].set(this.key(end, size), end);
    }
    this.indexed = Math.max(this.tokens.length - 1, 0);
  }

  key(end, size) {
    return this.tokens.slice(end - size, end).join(" ");
  }

  propose(room) {
    const most = Math.min(this.length, room);
    for (let size = Math.min(this.maxNgram, this.tokens.length); most > 0 && size >= this.minNgram; size -= 1) {
      const end = this.next[size - 1].get(this.key(this.tokens.length, size));
      if (end !== undefined) return chain(this.tokens.slice(end, end + most));
    }
    return chain([]);
  }
}

// The suffix automaton of a growing text (suffix.py: Automaton). Negative tokens separate texts.
export class Automaton {
  constructor() {
    Object.assign(this, { next: [new Map()], link: [-1], length: [0], count: [0], last: 0, size: 0 });
  }

  state(following, length, count) {
    this.next.push(following);
    this.link.push(-1);
    this.length.push(length);
    this.count.push(count);
    return this.next.length - 1;
  }

  extend(token) {
    this.size += 1;
    let made = this.state(new Map(), this.length[this.last] + 1, 0), state = this.last;
    while (state >= 0 && !this.next[state].has(token)) {
      this.next[state].set(token, made);
      state = this.link[state];
    }
    this.link[made] = state < 0 ? 0 : this.split(state, token);
    this.last = made;
    for (; made > 0; made = this.link[made]) this.count[made] += 1; // every suffix of the text occurs once more
  }

  split(from, token) {
    const target = this.next[from].get(token);
    if (this.length[target] === this.length[from] + 1) return target;
    const copy = this.state(new Map(this.next[target]), this.length[from] + 1, this.count[target]);
    this.link[copy] = this.link[target];
    this.link[target] = copy;
    for (let state = from; state >= 0 && this.next[state].get(token) === target; state = this.link[state]) this.next[state].set(token, copy);
    return copy;
  }

  step([state, length], token) {
    while (state > 0 && !this.next[state].has(token)) {
      state = this.link[state];
      length = this.length[state];
    }
    const following = this.next[state].get(token);
    return following === undefined ? [0, 0] : [following, length + 1];
  }

  remember(output) {
    for (const token of [...output, -1 - this.size]) this.extend(token);
  }
}

const BUCKETS = 16, BLENDED = 4, PRIOR = 16;
const RELIABILITY = [0.36, 0.53, 0.6, 0.65, 0.75, 0.78, 0.8, 0.82, 0.84, 0.86, 0.88, 0.89, 0.9, 0.91, 0.92, 0.94];

// A tree of what followed the text's longest suffixes, by frequency, in the text and in past outputs (suffix.py: Suffix).
class Suffix {
  constructor(prompt, past, nodes = 16, depth = 16, least = 0.05) {
    Object.assign(this, { past, nodes, depth, least, own: new Automaton(), match: [0, 0] });
    this.right = RELIABILITY.map((rate) => PRIOR * rate);
    this.seen = Array(BUCKETS).fill(PRIOR);
    this.clear();
    for (const token of prompt) this.own.extend(token);
    if (past.size) for (const token of prompt.slice(-256)) this.match = past.step(this.match, token);
  }

  clear() {
    Object.assign(this, { tokens: [], parents: [], depths: [], places: new Map(), used: new Map() });
  }

  add(tokens) {
    let node = -1;
    for (const token of tokens) {
      for (const [bucket, successors] of this.used.get(node) ?? []) {
        this.seen[bucket] += 1;
        if (successors.has(token)) {
          this.right[bucket] += 1;
          break;
        }
      }
      node = node === null ? null : this.places.get(`${node} ${token}`) ?? null;
    }
    for (const token of tokens) {
      this.own.extend(token);
      if (this.past.size) this.match = this.past.step(this.match, token);
    }
  }

  propose(room) {
    this.clear();
    const most = Math.min(this.depth, room);
    if (most < 1) return { tokens: [], parents: [] };
    const state = Math.max(this.own.link[this.own.last], 0);
    let matches = [[this.own, state, this.own.length[state]]];
    if (this.past.size) matches.push([this.past, ...this.match]);
    const candidates = []; // [probability, order, parent, token, matches]
    let node = -1, probability = 1, order = 0;
    for (;;) {
      if (node < 0 || this.depths[node] < most) {
        for (const [share, token, extended] of this.successors(node, matches, probability)) {
          candidates.push([share, order, node, token, extended]);
          order += 1;
        }
      }
      if (!candidates.length || this.tokens.length >= this.nodes) return { tokens: this.tokens, parents: this.parents };
      let best = 0;
      candidates.forEach((one, i) => {
        if (one[0] > candidates[best][0] || (one[0] === candidates[best][0] && one[1] < candidates[best][1])) best = i;
      });
      const [share, , parent, token, extended] = candidates.splice(best, 1)[0];
      node = this.tokens.push(token) - 1;
      this.parents.push(parent);
      this.depths.push(parent < 0 ? 1 : this.depths[parent] + 1);
      this.places.set(`${parent} ${token}`, node);
      probability = share;
      matches = extended;
    }
  }

  // Likely successors of a node that is reached with a probability. The longest match gets a share of it, its
  // reliability; shorter matches share the remainder.
  successors(node, given, reach) {
    const merged = new Map(), used = [];
    this.used.set(node, used);
    let remaining = reach;
    const matches = given.filter((match) => match[1] > 0);
    while (matches.length && remaining > this.least && used.length < BLENDED) {
      matches.sort((a, b) => a[2] - b[2]);
      const [automaton, state, length] = matches.pop();
      const shorter = automaton.link[state];
      if (shorter > 0) matches.push([automaton, shorter, automaton.length[shorter]]);
      const following = automaton.next[state];
      let total = 0;
      for (const [token, after] of following) total += token >= 0 ? automaton.count[after] : 0;
      if (!total) continue;
      const bucket = Math.min(length, BUCKETS) - 1;
      used.push([bucket, following]);
      const share = (remaining * this.right[bucket]) / this.seen[bucket];
      remaining -= share;
      for (const [token, after] of following) {
        const probability = (share * automaton.count[after]) / total;
        if (token < 0 || probability < this.least / 4) continue;
        const found = merged.get(token);
        if (!found) merged.set(token, [probability, [[automaton, after, length + 1]]]);
        else {
          found[0] += probability;
          if (found[1].every((match) => match[0] !== automaton)) found[1].push([automaton, after, length + 1]);
        }
      }
    }
    return [...merged].filter(([, [share]]) => share >= this.least).map(([token, [share, extended]]) => [share, token, extended]);
  }
}
