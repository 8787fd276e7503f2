"use strict";
// Ties the parts together: one step that all of them show, and what keys, pointer and buttons do to it.

class Page {
  constructor(data) {
    this.run = new Run(data);
    this.rows = new Rows(this.run);
    this.colors = new Colors();
    this.timeline = new Timeline(this.run, this.rows, this.colors);
    this.slots = new Slots(this.run, this.rows, this.colors);
    this.now = new Now(this.run, this.rows);
    this.step = this.run.openingStep;
    this.isPlaying = false;
    this.willDraw = false;
    this.setUp();
    this.tale = new Tale(this);
    this.goTo(Number(new URLSearchParams(location.hash.slice(1)).get("step")) || this.run.openingStep);
    this.draw();
    if (this.tale.story && !location.hash) this.tale.tell();
  }

  // --- what is shown -------------------------------------------------------------------------------------------------

  goTo(step) {
    this.step = Math.max(this.run.firstStep, Math.min(Math.round(step), this.run.lastStep));
    this.slider.value = this.stepBox.value = this.step;
    this.timeline.follow(this.step);
    this.later();
  }

  later() {
    if (this.willDraw) return;
    this.willDraw = true;
    requestAnimationFrame(() => {
      if (this.willDraw) this.draw();
    });
  }

  draw() {
    this.willDraw = false;
    this.timeline.draw(this.step);
    this.slots.draw(this.step);
    this.now.draw(this.step);
  }

  // The next step, or the one before, at which a row that is shown has an event that `isWanted`.
  neighbour(direction, isWanted = () => true) {
    const { run, rows } = this;
    let event = direction > 0 ? placeAfter(run.step, this.step) : placeAfter(run.step, this.step - 1) - 1;
    const isShown = () => rows.ofThread[run.thread[event]] >= 0 && this.timeline.isShown(event) && isWanted(event);
    while (event >= 0 && event < run.count && !isShown()) event += direction;
    return event >= 0 && event < run.count ? run.step[event] : direction > 0 ? run.lastStep : run.firstStep;
  }

  goToWait(direction) {
    this.goTo(this.neighbour(direction, (event) => this.run.kind[event] >= KIND.wait));
  }

  play(isPlaying = !this.isPlaying) {
    this.isPlaying = isPlaying;
    document.getElementById("play").textContent = isPlaying ? "❚❚" : "▶";
    let [before, place] = [performance.now(), this.step];
    const turn = (time) => {
      if (!this.isPlaying) return;
      place += ((time - before) / 15000) * (this.timeline.to - this.timeline.from); // a width in 15 seconds
      before = time;
      this.goTo(place);
      if (this.step >= this.run.lastStep) this.play(false);
      else requestAnimationFrame(turn);
    };
    if (isPlaying) requestAnimationFrame(turn);
  }

  zoom(factor) {
    this.timeline.zoom(factor, this.step);
    this.later();
  }

  showAll() {
    this.timeline.showAll();
    this.later();
  }

  changeTheme() {
    const root = document.documentElement;
    const isDark = getComputedStyle(root).colorScheme === "dark" || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    root.dataset.theme = isDark ? "light" : "dark";
    this.colors.read();
    this.later();
  }

  // --- what the user does --------------------------------------------------------------------------------------------

  setUp() {
    const get = (id) => document.getElementById(id);
    [this.slider, this.stepBox, this.tip] = [get("slider"), get("step"), get("tip")];
    const number = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
    const { numRanks, lastStep, count } = this.run;
    get("title").textContent = [number(numRanks, "rank"), number(lastStep, "step"), number(count, "event")].join(" · ");
    for (const input of [this.slider, this.stepBox]) {
      [input.min, input.max] = [this.run.firstStep, this.run.lastStep];
      input.addEventListener("input", () => input.value !== "" && this.goTo(Number(input.value)));
    }
    const clicks = {
      first: () => this.goTo(this.run.firstStep),
      before: () => this.goTo(this.neighbour(-1)),
      play: () => this.play(),
      next: () => this.goTo(this.neighbour(1)),
      last: () => this.goTo(this.run.lastStep),
      "zoom-in": () => this.zoom(0.5),
      "zoom-out": () => this.zoom(2),
      "zoom-all": () => this.showAll(),
      theme: () => this.changeTheme(),
      help: () => get("keys").showModal(),
    };
    for (const [id, action] of Object.entries(clicks)) get(id).addEventListener("click", action);
    this.setUpCalls(get("call"));
    this.setUpPointer();
    this.setUpTable();
    document.addEventListener("keydown", (event) => this.onKey(event));
    addEventListener("resize", () => this.later());
    new ResizeObserver(() => this.later()).observe(this.timeline.section);
    this.timeline.section.addEventListener("scroll", () => this.later());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.colors.read();
      this.later();
    });
  }

  setUpCalls(select) {
    select.add(new Option("all", -1));
    this.run.calls.forEach((_, call) => select.add(new Option(this.run.callName(call), call)));
    select.addEventListener("change", () => {
      this.rows.call = Number(select.value);
      this.rows.build();
      this.timeline.showAll();
      if (this.rows.call >= 0) {
        const [begin, end] = this.run.spans[this.rows.call];
        if (this.step < begin || this.step > end) this.goTo(begin);
      }
      this.later();
    });
  }

  setUpTable() {
    this.now.body.addEventListener("click", (event) => {
      const row = event.target.closest("tr[data-key]");
      if (!row) return;
      this.now.chosen = row.dataset.key;
      this.now.depth = null;
      this.later();
    });
    this.now.where.addEventListener("click", (event) => {
      if (event.target.dataset.depth === undefined) return;
      this.now.depth = Number(event.target.dataset.depth);
      this.later();
    });
  }

  setUpPointer() {
    const { timeline } = this;
    const { canvas, section } = timeline;
    let pressed = null; // where the pointer went down
    let isDragged = false;
    canvas.addEventListener("pointerdown", (event) => {
      pressed = event.offsetX;
      isDragged = false;
    });
    canvas.addEventListener("pointermove", (event) => {
      if (pressed !== null && event.buttons && Math.abs(event.offsetX - pressed) > (isDragged ? 0 : 4)) {
        if (!isDragged) canvas.setPointerCapture(event.pointerId);
        isDragged = true;
        timeline.pan(pressed - event.offsetX);
        pressed = event.offsetX;
        this.later();
      } else this.hover(event);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (pressed !== null && !isDragged) this.click(event.offsetX, event.offsetY);
      pressed = null;
    });
    canvas.addEventListener("pointerleave", () => this.showTip());
    section.addEventListener(
      "wheel",
      (event) => {
        if (event.ctrlKey || event.metaKey) timeline.zoom(1.0025 ** event.deltaY, timeline.stepAt(event.offsetX));
        else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) timeline.pan(event.deltaX || event.deltaY);
        else return;
        event.preventDefault();
        this.later();
      },
      { passive: false },
    );
    this.slots.canvas.addEventListener("pointermove", (event) => {
      const box = this.slots.boxAt(event.offsetX, event.offsetY);
      this.showTip(box && `${escaped(box[3])}${box[4] ? `<br>${escaped(box[4])}` : ""}`, event);
    });
    this.slots.canvas.addEventListener("click", (event) => {
      const box = this.slots.boxAt(event.offsetX, event.offsetY);
      const story = box && this.tale.of(box[4], box[5].kernel, box[5].call);
      if (story) this.tale.tell(story);
    });
    this.slots.canvas.addEventListener("pointerleave", () => this.showTip());
  }

  click(x, y) {
    const row = this.rows.at(y - RULER + this.timeline.section.scrollTop);
    if (x < LABELS && row && y > RULER) this.rows.toggle(row);
    else if (x >= LABELS) {
      const event = this.timeline.eventAt(x, y);
      if (row && y > RULER) this.now.chosen = `${row.rank} ${row.label}`;
      this.goTo(event >= 0 && this.run.kind[event] < KIND.wait ? this.run.step[event] : this.timeline.stepAt(x));
    }
    this.later();
  }

  hover(pointer) {
    const event = this.timeline.eventAt(pointer.offsetX, pointer.offsetY);
    if (event !== this.timeline.hovered) {
      this.timeline.hovered = event;
      this.later();
    }
    if (event < 0) return this.showTip();
    const { run } = this;
    const [line] = run.linesOf(event);
    const who = `step ${run.step[event].toLocaleString("en")} · ${run.threadName(run.thread[event])}, lane ${run.lane[event]}`;
    const code = line ? `<code>${escaped(`${line.file}:${line.number}  ${codeOf(line)}`)}</code>` : "";
    return this.showTip(`${escaped(who)}<br><b>${escaped(run.words(event))}</b>${code}`, pointer);
  }

  showTip(html, pointer) {
    this.tip.hidden = !html;
    if (!html) return;
    this.tip.innerHTML = html;
    const { width, height } = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.min(pointer.clientX + 14, innerWidth - width - 8)}px`;
    this.tip.style.top = `${pointer.clientY + 18 + height > innerHeight ? pointer.clientY - height - 10 : pointer.clientY + 18}px`;
  }

  onKey(event) {
    const isTyping = event.target.matches("select, input[type='number']");
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return undefined;
    if (event.key.toLowerCase() === "s") return this.tale.isShown ? this.tale.explore() : this.tale.tell(undefined, this.tale.number);
    if (this.tale.isShown) {
      const turn = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (turn) this.tale.goTo(this.tale.number + turn);
      return undefined;
    }
    const { shiftKey } = event;
    const page = (this.timeline.to - this.timeline.from) / 10;
    const actions = {
      ArrowRight: () => this.goTo(shiftKey ? this.step + 1 : this.neighbour(1)),
      ArrowLeft: () => this.goTo(shiftKey ? this.step - 1 : this.neighbour(-1)),
      PageDown: () => this.goTo(this.step + page),
      PageUp: () => this.goTo(this.step - page),
      Home: () => this.goTo(this.run.firstStep),
      End: () => this.goTo(this.run.lastStep),
      w: () => this.goToWait(shiftKey ? -1 : 1),
      " ": () => this.play(),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.showAll(),
      t: () => this.changeTheme(),
      "?": () => document.getElementById("keys").showModal(),
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action || (event.key === " " && event.target.matches("button"))) return undefined;
    event.preventDefault();
    return action();
  }
}

window.page = new Page(JSON.parse(document.getElementById("data").textContent));
