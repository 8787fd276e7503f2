"use strict";
// The story of a token: one picture and one caption a step. Ranks are columns, places where the token comes to lie are boxes.

const SVG = document.getElementById("svg").namespaceURI;
const COLUMN = 300;
const BOX = { width: 236, height: 62, gap: 30, top: 62 };

class Tale {
  constructor(page) {
    this.page = page;
    this.run = page.run;
    this.section = document.getElementById("story");
    this.number = 0; // of the step
    this.story = this.run.stories[0];
    const get = (id) => document.getElementById(id);
    this.select = get("token");
    this.run.stories.forEach((story, i) => this.select.add(new Option(this.nameOf(story), i)));
    this.select.addEventListener("change", () => this.tell(this.run.stories[Number(this.select.value)]));
    get("story-before").addEventListener("click", () => this.goTo(this.number - 1));
    get("story-next").addEventListener("click", () => this.goTo(this.number + 1));
    get("explore").addEventListener("click", () => this.explore());
    get("tell").addEventListener("click", () => this.tell(this.story, this.number));
    get("tell").hidden = !this.story;
  }

  get isShown() {
    return !this.section.hidden;
  }

  nameOf(story) {
    return story.kernel ? `${story.title}, ${this.run.callName(this.run.calls.findIndex(([k, c]) => k === story.kernel && c === story.call))}` : story.title;
  }

  // The story of the token that a slot holds, as its text names it; undefined if there is none.
  of(text, kernel, call) {
    const isBack = (story) => ({ combine: "dispatch", low_latency_combine: "low_latency_dispatch", internode_combine: "internode_dispatch" })[kernel] === story.kernel;
    return this.run.stories.find((story) => story.title === text && story.call === call && (story.kernel === kernel || isBack(story)));
  }

  tell(story = this.story, number = 0) {
    if (!story) return this.explore();
    this.story = story;
    this.select.value = this.run.stories.indexOf(story);
    this.section.hidden = false;
    document.body.classList.add("tells");
    return this.goTo(number);
  }

  explore() {
    this.section.hidden = true;
    document.body.classList.remove("tells");
    if (!this.story) return this.page.showAll();
    // The steps that it tells, and the ranks that they are on; the others are closed.
    const { steps, stations } = this.story;
    const told = new Set(stations.map(({ rank }) => rank));
    const { rows, timeline } = this.page;
    rows.closedRanks = new Set(this.run.threads.map(([rank]) => rank).filter((rank) => !told.has(rank)));
    rows.build();
    const times = steps.map(({ step }) => step);
    timeline.show(Math.min(...times), Math.max(...times));
    return this.page.goTo(steps[this.number].step);
  }

  goTo(number) {
    const { steps } = this.story;
    this.number = Math.max(0, Math.min(number, steps.length - 1));
    const step = steps[this.number];
    const get = (id) => document.getElementById(id);
    get("story-before").disabled = this.number === 0;
    get("story-next").disabled = this.number === steps.length - 1;
    get("story-number").textContent = `${this.number + 1} of ${steps.length}`;
    get("story-title").innerHTML = marked(step.title);
    get("story-text").innerHTML = marked(step.text);
    const [source, line] = step.line < 0 ? [] : this.run.lines[step.line];
    const where = step.line < 0 ? null : { ...this.run.sources[source], number: line };
    get("story-line").textContent = where ? `${where.file}:${where.number}   ${codeOf(where)}` : "";
    get("story-report").textContent = step.report;
    this.draw(step);
  }

  draw(step) {
    const { stations } = this.story;
    const ranks = [...new Set(stations.map(({ rank }) => rank))].sort((a, b) => a - b);
    const places = [];
    const fill = new Map(ranks.map((rank) => [rank, 0]));
    for (const station of stations) {
      const row = fill.get(station.rank);
      fill.set(station.rank, row + 1);
      places.push({ x: ranks.indexOf(station.rank) * COLUMN + 22, y: BOX.top + row * (BOX.height + BOX.gap) });
    }
    const rows = Math.max(...fill.values());
    const height = BOX.top + rows * (BOX.height + BOX.gap) + 30;
    const svg = element("svg", { viewBox: `0 0 ${ranks.length * COLUMN} ${height}`, role: "img", "aria-label": step.title });
    svg.append(arrowHead());
    ranks.forEach((rank, i) => {
      const group = element("g", { class: "rank" });
      group.append(element("rect", { x: i * COLUMN + 6, y: 6, width: COLUMN - 12, height: height - 12, rx: 14 }));
      group.append(label(i * COLUMN + 22, 34, this.run.rankName(rank), "name"));
      for (const [kind, who] of [["acts", step.who], ["waits", step.waits]]) {
        if (who && who[0] === rank) group.append(...this.pill(i * COLUMN + COLUMN - 20, 34, `${who[1]} ${kind}`, kind));
      }
      svg.append(group);
    });
    stations.forEach((station, i) => svg.append(...this.box(station, places[i], i, step)));
    if (step.at !== step.to) svg.append(this.arrow(places[step.at], places[step.to]));
    const box = document.getElementById("story-picture");
    box.replaceChildren(svg);
  }

  box(station, { x, y }, number, step) {
    const isTarget = number === step.to && step.at !== step.to;
    const isHere = number === step.at;
    const state = isHere || isTarget ? "here" : number < step.at ? "was" : "";
    const parts = [
      element("rect", { class: `station ${state}`, x, y, width: BOX.width, height: BOX.height, rx: 9 }),
      label(x + 46, y + 24, station.title, "title"),
      label(x + 46, y + 41, station.detail, "detail"),
    ];
    if (isHere) parts.push(element("circle", { class: "token", cx: x + 24, cy: y + 28, r: 12 }));
    else if (isTarget) parts.push(element("circle", { class: step.filled ? "token" : "token coming", cx: x + 24, cy: y + 28, r: 12 }));
    else if (number < step.at) parts.push(element("circle", { class: "token was", cx: x + 24, cy: y + 28, r: 12 }));
    return [...parts, ...this.slots(station, x + 46, y + 47, step)];
  }

  // The other slots of its ring at this step: free, being filled, or published.
  slots(station, x, y, step) {
    const row = station.ring && this.run.slots.find((each) =>
      each.rank === station.rank && each.title === station.ring && each.kernel === station.kernel && each.call === station.call);
    if (!row) return [];
    const { states } = this.page.slots.statesAt(row, step.step);
    const shown = Math.min(row.count, 14);
    return [...states].slice(0, shown).map((state, slot) =>
      element("rect", { class: `slot s${state}${slot === station.slot ? " mine" : ""}`, x: x + slot * 13, y, width: 10, height: 9, rx: 2.5 }));
  }

  arrow(from, to) {
    const start = { x: from.x + (to.x > from.x ? BOX.width : to.x < from.x ? 0 : 24), y: from.y + (to.x === from.x ? BOX.height : BOX.height / 2) };
    const end = { x: to.x + (to.x > from.x ? 0 : to.x < from.x ? BOX.width : 24), y: to.y + (to.x === from.x ? (to.y > from.y ? 0 : BOX.height) : BOX.height / 2) };
    if (to.x === from.x && to.y < from.y) start.y = from.y;
    const bend = (end.x - start.x) / 2;
    const d = `M ${start.x} ${start.y} C ${start.x + bend} ${start.y}, ${end.x - bend} ${end.y}, ${end.x} ${end.y}`;
    return element("path", { class: "move", d, "marker-end": "url(#arrow)" });
  }

  pill(right, y, text, kind) {
    const width = 22 + 6.6 * text.length;
    return [
      element("rect", { class: `pill ${kind}`, x: right - width, y: y - 15, width, height: 21, rx: 10.5 }),
      label(right - width / 2, y, text, `pill ${kind}`, "middle"),
    ];
  }
}

function element(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function label(x, y, text, name, anchor = "start") {
  const made = element("text", { x, y, class: name, "text-anchor": anchor });
  made.textContent = text;
  return made;
}

function arrowHead() {
  const marker = element("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" });
  marker.append(element("path", { d: "M 0 0 L 8 4 L 0 8 z", class: "head" }));
  const defs = element("defs", {});
  defs.append(marker);
  return defs;
}

// `code` and *emphasis* of a caption as HTML.
function marked(text) {
  return escaped(text).replace(/`([^`]+)`/g, "<code>$1</code>").replace(/\*([^*]+)\*/g, "<em>$1</em>");
}
