// The page's replays, steppers and cards. Texts enter the page as text nodes only, never as HTML.
// Runs once, with one listener a kind of event on the document; new results are found by an observer.
if (!window.outriderPage) {
  window.outriderPage = true;
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const el = (tag, className = "", text = "", attributes = {}) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== "") made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  const button = (text, label, act, className = "or-button") => {
    const made = el("button", className, text, {type: "button", "aria-label": label});
    made.addEventListener("click", act);
    return made;
  };
  const choose = (label, options, value, act) => {
    const made = el("select", "or-select", "", {"aria-label": label});
    for (const [name, of] of options) made.append(el("option", "", name, {value: of}));
    made.value = value;
    made.addEventListener("change", () => act(Number(made.value)));
    return made;
  };
  const onSight = (root, act) => {
    const eye = new IntersectionObserver((seen) => {
      if (seen.some((one) => one.isIntersecting)) { eye.disconnect(); act(); }
    });
    eye.observe(root);
  };

  // ---- races: everything with data-at appears at its second

  const race = (root) => {
    const longest = Math.max(Number(root.dataset.longest), 0.001);
    const lanes = [...root.querySelectorAll(".or-lane")].map((lane) => ({
      takes: Number(lane.dataset.takes), bar: lane.querySelector(".or-run"), clock: lane.querySelector(".or-clock"),
      parts: [...lane.querySelectorAll("[data-at]")].map((part) => [Number(part.dataset.at), part])
        .sort((a, b) => a[0] - b[0]), next: 0,
    }));
    const speeds = [1, 0.5, 0.25, 0.1, 0.05, 0.02];
    let speed = speeds.find((one) => longest / one >= 5) || 0.02, now = 0, last = 0, playing = false;
    const draw = () => {
      for (const lane of lanes) {
        while (lane.next < lane.parts.length && lane.parts[lane.next][0] <= now)
          lane.parts[lane.next++][1].classList.remove("or-later");
        while (lane.next > 0 && lane.parts[lane.next - 1][0] > now)
          lane.parts[--lane.next][1].classList.add("or-later");
        const at = Math.min(now, lane.takes);
        if (lane.bar) lane.bar.style.width = (100 * at) / longest + "%";
        if (lane.clock) lane.clock.textContent = at.toFixed(2) + " s";
      }
      slider.value = now;
    };
    const frame = (time) => {
      if (!playing || !root.isConnected) return;
      now = Math.min(now + (last ? (time - last) / 1000 : 0) * speed, longest);
      last = time;
      draw();
      if (now >= longest) stop(); else requestAnimationFrame(frame);
    };
    const stop = () => { playing = false; play.textContent = now >= longest ? "Replay" : "Play"; };
    const start = () => {
      if (now >= longest) now = 0;
      playing = true; last = 0; play.textContent = "Pause";
      requestAnimationFrame(frame);
    };
    const play = el("button", "or-button", "Play", {type: "button"});
    play.addEventListener("click", () => (playing ? stop() : start()));
    const slider = el("input", "or-slider", "", {
      type: "range", min: 0, max: longest, step: longest / 500, value: 0, "aria-label": "time of the race in seconds",
    });
    slider.addEventListener("input", () => { playing = false; now = Number(slider.value); draw(); stop(); });
    const names = speeds.map((one) => [one === 1 ? "real time" : `${Math.round(1 / one)} times slower`, one]);
    const bar = el("div", "or-bar");
    bar.append(play, slider, choose("speed of the replay", names, speed, (one) => { speed = one; }));
    root.append(bar);
    if (calm) { now = longest; draw(); stop(); } else { draw(); onSight(root, start); }
  };

  // ---- steppers

  const KINDS = {
    drafted: "guessed and accepted", relaxed: "guessed, accepted only because the rule is relaxed",
    rejected: "guessed and rejected", untried: "guessed, but not reached",
    resampled: "written by the target after a rejection", bonus: "written by the target after an accepted draft",
  };
  const steppers = new WeakMap();
  const rootOf = (part) => part.closest(".or-root");
  const stepperOf = (part) => {
    const made = rootOf(part)?.querySelector(".or-stepper");
    return made && steppers.get(made);
  };

  const stepper = (root) => {
    const story = JSON.parse(root.dataset.story), rounds = story.rounds;
    const place = new Map();
    rounds.forEach((round, index) => round.rows.forEach((row) => place.set(row.s, [index, row])));
    let at = 0, timer = 0, speed = 1;
    const say = el("p", "or-say", "", {"aria-live": "polite"});
    const scene = el("div", "or-scene");
    const count = el("span", "or-count");
    const slider = el("input", "or-slider", "", {
      type: "range", min: 1, max: Math.max(rounds.length, 1), step: 1, value: 1, "aria-label": "target pass",
    });
    const beat = () => 700 / speed;
    const before = (index, row) => {
      let text = "";
      for (let i = index - 1; i >= 0 && text.length < 90; i--)
        for (const other of rounds[i].rows)
          if (other.row === row.row) text = other.out.map((one) => story.names[one[0]]).join("") + text;
      return text.slice(-90);
    };
    const guess = (row, node, index, moving) => {
      const [name, column, line, state, p, q] = node;
      const made = button("", "", () => card(story, row, "g" + index, made), "or-g or-is-" + state);
      made.append(el("b", "", story.names[name]));
      if (state === "untried") made.append(el("small", "", "not reached"));
      else if (p !== null) made.append(el("small", "", `p ${p.toFixed(2)} ${q === null ? "fixed" : "q " + q.toFixed(2)}`));
      made.setAttribute("aria-label", `${story.names[name]}: ${KINDS[state]}; explain`);
      made.style.gridArea = `${line + 1} / ${column}`;
      if (moving) made.style.setProperty("--i", column);
      return made;
    };
    const show = (index, moving = false) => {
      at = Math.min(Math.max(index, 0), rounds.length - 1);
      const round = rounds[at];
      slider.value = at + 1;
      count.textContent = `Target pass ${at + 1} of ${rounds.length}` + (round.ms ? `, ${round.ms.toFixed(1)} ms` : "");
      const several = story.rows.length > 1;
      say.textContent = several ? `${round.rows.length} rows share this target pass.` : round.rows[0].say;
      scene.replaceChildren();
      scene.classList.toggle("or-moving", moving && !calm);
      scene.style.setProperty("--beat", beat() + "ms");
      for (const row of round.rows) {
        const line = el("div", "or-row");
        if (several) line.append(el("p", "or-say", `Row ${row.row + 1}: ${row.say}`));
        line.append(el("span", "or-before", before(at, row) || "prompt"));
        const guesses = el("div", "or-guesses", "", {tabindex: 0, role: "group", "aria-label": "guesses and the target's token"});
        row.nodes.forEach((node, number) => guesses.append(guess(row, node, number, moving)));
        const level = row.out.findIndex((one) => one[1] === "resampled" || one[1] === "bonus");
        if (level >= 0) {
          const one = row.out[level], made = button("", "", () => card(story, row, "o" + level, made), "or-g or-is-" + one[1]);
          made.append(el("b", "", story.names[one[0]]), el("small", "", "by the target"));
          made.setAttribute("aria-label", `${story.names[one[0]]}: ${KINDS[one[1]]}; explain`);
          const last = level > 0 ? row.out[level - 1][2] : null, above = last === null ? null : row.nodes[last];
          const column = above ? above[1] + 1 : 1;
          const taken = row.nodes.filter((node) => node[1] === column).map((node) => node[2] + 1);
          made.style.gridArea = `${Math.max(0, ...taken) + 1} / ${column}`;
          guesses.append(made);
        }
        line.append(guesses);
        const notes = [row.more ? `${row.more} more guesses, not shown` : "", row.note || "",
          row.tv ? `total variation ${row.tv}` : ""].filter(Boolean).join("; ");
        if (notes) line.append(el("p", "or-where", notes));
        scene.append(line);
      }
      const top = Math.max(...round.rows.map((row) => row.s)), of = rootOf(root);
      const final = at === rounds.length - 1 && !story.missing;
      of?.querySelectorAll("[data-s]").forEach((part) => {
        const step = Number(part.dataset.s);
        part.classList.toggle("or-after", touched && !final && step > top);
        part.classList.toggle("or-now", touched && step <= top && round.rows.some((row) => row.s === step));
      });
    };
    let touched = false;
    const go = (index) => { touched = true; halt(); show(index); };
    const halt = () => { clearTimeout(timer); timer = 0; play.textContent = "Play"; };
    const tick = () => {
      if (!root.isConnected || at >= rounds.length - 1) return halt();
      show(at + 1, true);
      timer = setTimeout(tick, 4 * beat());
    };
    const toggle = () => {
      if (timer) return halt();
      const first = !touched || at >= rounds.length - 1;
      touched = true;
      play.textContent = "Pause";
      show(first ? 0 : at, true);
      timer = setTimeout(tick, 4 * beat());
    };
    const play = el("button", "or-button or-play", "Play", {type: "button"});
    play.addEventListener("click", toggle);
    slider.addEventListener("input", () => go(Number(slider.value) - 1));
    const bar = el("div", "or-bar");
    const speeds = [["half speed", 0.5], ["normal speed", 1], ["double speed", 2], ["4 times", 4]];
    bar.append(button("◀", "one target pass back", () => go(at - 1)), play,
      button("▶", "one target pass on", () => go(at + 1)), slider,
      choose("speed of the stepper", speeds, 1, (one) => { speed = one; }), count);
    root.addEventListener("keydown", (event) => {
      if (event.target.matches("input, select")) return;
      const step = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: rounds.length - 1}[event.key];
      if (step === undefined) return;
      event.preventDefault();
      go(step);
    });
    let from = null;
    scene.addEventListener("pointerdown", (event) => { from = event.pointerType === "mouse" ? null : event.clientX; });
    scene.addEventListener("pointerup", (event) => {
      const by = from === null ? 0 : event.clientX - from;
      if (Math.abs(by) > 50) go(at + (by < 0 ? 1 : -1));
    });
    root.append(bar, say, scene);
    if (story.missing) root.append(el("p", "or-where", `${story.missing} more steps, not shown`));
    steppers.set(root, {story, place, open: (step, key, from) => {
      const found = place.get(step);
      if (!found) return;
      go(found[0]);
      card(story, found[1], key, from);
    }});
    const accepted = (row) => row.nodes.some((node) => node[3] === "drafted");
    const refused = (row) => row.out.some((one) => one[1] === "resampled");
    const telling = rounds.findIndex((round) => round.rows.some((row) => accepted(row) && refused(row)));
    const firstWith = (wanted) => rounds.findIndex((round) => round.rows.some((row) => row.nodes.some(wanted)));
    show([telling, firstWith((node) => node[3] === "drafted"), firstWith(() => true), 0].find((index) => index >= 0));
  };

  // ---- cards

  const sheet = el("div", "or-cardbox", "", {role: "dialog", "aria-label": "token", tabindex: -1});
  let opener = null;
  const close = () => { if (sheet.isConnected) { sheet.remove(); opener?.focus?.({preventScroll: true}); } };
  const meter = (name, value, className, mark = null) => {
    const line = el("div", "or-meter");
    const track = el("span", "or-meter-track");
    const fill = el("span", "or-meter-fill " + className);
    fill.style.width = 100 * Math.min(Math.max(value, 0), 1) + "%";
    track.append(fill);
    if (mark !== null) {
      const dot = el("span", "or-dice");
      dot.style.left = 100 * mark + "%";
      track.append(dot);
    }
    line.append(el("span", "or-meter-name", name), track, el("span", "or-meter-value", value.toFixed(3)));
    return line;
  };
  const card = (story, row, key, from) => {
    const number = Number(key.slice(1)), committed = key[0] === "o" ? row.out[number] : null;
    const node = committed ? (committed[2] === null ? null : row.nodes[committed[2]]) : row.nodes[number];
    if (!committed && !node) return;
    const level = committed ? number : row.out.findIndex((one) => one[2] === number);
    const state = committed ? committed[1] : node[3];
    opener = from;
    sheet.replaceChildren(button("×", "close", close, "or-close"),
      el("b", "or-token", story.names[committed ? committed[0] : node[0]]), el("span", "", " " + KINDS[state]));
    if (state === "untried") {
      sheet.append(el("p", "", "The rule never came to this guess: one before it was rejected, or another one accepted."));
    } else if (node && node[4] !== null) {
      const [, , , , p, q, chance, dice] = node;
      sheet.append(meter("p, target", p, "or-p"));
      if (q !== null) sheet.append(meter("q, drafter", q, "or-q"));
      sheet.append(meter("chance", chance, "or-chance", dice));
      const rule = q === null ? "The guess was fixed, not drawn, so its chance is p." : "Its chance is at least min(1, p/q) under an exact rule.";
      let thrown = rule;
      if (story.greedy) thrown = "At temperature 0 no random number is drawn: the target's most likely token wins.";
      else if (dice !== null) thrown = `The dice showed ${dice.toFixed(3)}, ${dice < chance ? "below" : "not below"} the chance of ${chance.toFixed(3)}, so it was ${dice < chance ? "accepted" : "rejected"}.`;
      sheet.append(el("p", "", thrown));
    } else if (!node) {
      sheet.append(el("p", "", "Nobody guessed it: the target pass itself gave this token, as plain decoding would."));
    }
    const likely = level >= 0 && row.out[level] ? row.out[level][3] : [];
    if (likely.length) {
      sheet.append(el("p", "or-where", "The target's most likely tokens here"));
      for (const [name, share] of likely) sheet.append(meter(story.names[name], share, "or-p"));
    }
    document.body.append(sheet);
    sheet.focus({preventScroll: true});
  };

  // ---- events of the whole page

  const explain = (part) => {
    const step = Number(part.dataset.s);
    stepperOf(part)?.open(step, part.dataset.c, part.closest(".or-tokens"));
  };
  document.addEventListener("click", (event) => {
    const part = event.target.closest?.(".or-t[data-c]");
    if (part && !String(getSelection())) explain(part);
    else if (sheet.isConnected && !sheet.contains(event.target) && !event.target.closest?.(".or-g")) close();
    const copy = event.target.closest?.(".or-copy");
    if (copy) {
      const url = new URL(copy.dataset.link, location.href).href;
      navigator.clipboard?.writeText(url).then(() => { copy.textContent = "Copied"; }, () => {});
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return close();
    const box = event.target.closest?.(".or-tokens[tabindex]");
    if (!box || box !== event.target) return;
    const parts = [...box.querySelectorAll(".or-t[data-c]")].filter((part) => part.offsetParent !== null);
    let index = parts.findIndex((part) => part.classList.contains("or-at"));
    if (event.key === "Enter" && index >= 0) return explain(parts[index]);
    const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!by) return;
    event.preventDefault();
    parts[index]?.classList.remove("or-at");
    index = Math.min(Math.max(index + by, 0), parts.length - 1);
    parts[index]?.classList.add("or-at");
    parts[index]?.scrollIntoView({block: "nearest"});
  });
  const follow = (audio) => {
    const strip = audio.closest(".or-lane")?.querySelector(".or-strip");
    if (!strip) return;
    const share = audio.currentTime / Number(strip.dataset.seconds);
    strip.querySelector(".or-playhead").setAttribute("transform", `translate(${880 * Math.min(share, 1)} 0)`);
    strip.querySelectorAll(".or-word").forEach((word) =>
      word.classList.toggle("or-said", Number(word.dataset.from) <= audio.currentTime && audio.currentTime > 0));
    if (!audio.paused && !audio.ended) requestAnimationFrame(() => follow(audio));
  };
  for (const name of ["play", "seeked", "ended"])
    document.addEventListener(name, (event) => { if (event.target.matches?.("audio")) follow(event.target); }, true);
  const scan = () => {
    if (document.querySelector("#text-out .or-lane")) document.querySelector("#or-first")?.remove();
    document.querySelectorAll("gradio-app .or-race:not([data-on])").forEach((root) => { root.dataset.on = 1; race(root); });
    document.querySelectorAll(".or-stepper:not([data-on])").forEach((root) => { root.dataset.on = 1; stepper(root); });
  };
  new MutationObserver(scan).observe(document.body, {childList: true, subtree: true});
  scan();
}
