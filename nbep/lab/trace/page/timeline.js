"use strict";
// The timeline: a canvas that stays where it is while its section scrolls. What is drawn is what is in view.

const LABELS = 168; // pixels of the names on the left
const RULER = 26;
const FAINT_ARROWS = 400; // more than these in view, and the arrows get fainter
const LOUD_ARROWS = 40; // so many are thick while their value is on its way

// Colours of the style sheet, as a canvas takes them.
class Colors {
  constructor() {
    this.probe = document.body.appendChild(document.createElement("i"));
    this.probe.hidden = true;
    this.read();
  }

  read() {
    for (const name of "panel stripe line ink soft accent cursor launch wait stuck run tail head shared other".split(" ")) {
      this.probe.style.color = `var(--${name})`;
      this[name] = getComputedStyle(this.probe).color;
    }
  }
}

// A canvas as large as its element's place, in device pixels; returns what draws on it.
function fitted(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    [canvas.width, canvas.height] = [w, h];
    [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

class Timeline {
  constructor(run, rows, colors) {
    Object.assign(this, { run, rows, colors });
    this.section = document.getElementById("timeline");
    this.canvas = this.section.querySelector("canvas");
    this.hovered = -1; // an event
    this.showAll();
  }

  showAll() {
    this.show(...(this.rows.call < 0 ? [this.run.firstStep, this.run.lastStep] : this.run.spans[this.rows.call]));
  }

  show(from, to) {
    const least = 20;
    const span = Math.max(to - from, least);
    const margin = 0.02 * span;
    [this.from, this.to] = [from - margin, from + span + margin];
  }

  // Zoom by a factor, with a step staying where it is.
  zoom(factor, step = (this.from + this.to) / 2) {
    const whole = 1.2 * (this.run.lastStep - this.run.firstStep) + 40;
    const span = Math.min(Math.max((this.to - this.from) * factor, 12), whole);
    const share = (step - this.from) / (this.to - this.from);
    this.from = step - share * span;
    this.to = this.from + span;
  }

  pan(pixels) {
    const steps = (pixels / this.plotWidth) * (this.to - this.from);
    this.from += steps;
    this.to += steps;
  }

  // Bring a step into view.
  follow(step) {
    const span = this.to - this.from;
    if (step < this.from || step > this.to) {
      this.from = step - 0.3 * span;
      this.to = this.from + span;
    }
  }

  get plotWidth() {
    return Math.max(this.section.clientWidth - LABELS - 8, 40);
  }

  x(step) {
    return LABELS + ((step - this.from) / (this.to - this.from)) * this.plotWidth;
  }

  stepAt(x) {
    return Math.round(this.from + ((x - LABELS) / this.plotWidth) * (this.to - this.from));
  }

  // Where a row's line is, in pixels of the canvas.
  y(row) {
    const { top, height, kind } = this.rows.list[row];
    return RULER + top - this.section.scrollTop + (kind === "rank" ? height - 12 : height * 0.45);
  }

  draw(step) {
    const { section, rows } = this;
    const [width, height] = [section.clientWidth, section.clientHeight];
    section.querySelector(".spacer").style.height = `${rows.height + RULER + 8}px`;
    const pen = (this.pen = fitted(this.canvas, width, height));
    this.height = height;
    this.heights = rows.list.map((_, row) => this.y(row));
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.drawRows(width);
    pen.save();
    pen.beginPath();
    pen.rect(LABELS, RULER, width - LABELS, height - RULER);
    pen.clip();
    this.drawLaunches();
    this.drawWaits();
    this.drawArrows(step);
    this.drawEvents();
    this.drawCursor(step, height);
    pen.restore();
    this.drawRuler(width, step);
  }

  drawRows(width) {
    const { pen, colors } = this;
    for (const row of this.rows.list) {
      const top = RULER + row.top - this.section.scrollTop;
      if (top > this.height || top + row.height < RULER) continue;
      if (row.kind === "rank") {
        pen.fillStyle = colors.stripe;
        pen.fillRect(0, top, width, row.height);
      }
      pen.fillStyle = row.kind === "warp" ? colors.soft : colors.ink;
      pen.font = `${row.kind === "rank" ? "600 12px" : "11.5px"} system-ui, sans-serif`;
      const indent = { rank: 10, role: 24, warp: 40 }[row.kind];
      const sign = row.kind === "warp" ? "" : row.isOpen ? "▾ " : "▸ ";
      pen.fillText(sign + row.label, indent, top + row.height / 2, LABELS - indent - 6);
      if (row.kind === "rank" && row.isOpen) continue;
      pen.fillStyle = colors.line;
      pen.fillRect(LABELS, Math.round(this.y(row.number)), width - LABELS, 0.6);
    }
  }

  drawLaunches() {
    const { pen, run, colors, rows } = this;
    pen.font = "10.5px system-ui, sans-serif";
    for (const launch of run.launches) {
      const [rank, call, begin] = launch;
      const row = rows.list[rows.ofRank.get(rank)];
      if (!row || (rows.call >= 0 && call !== rows.call)) continue;
      const [x1, x2] = [this.x(begin), this.x(run.launchEnd(launch))];
      const y = RULER + row.top - this.section.scrollTop + 3;
      if (x2 < LABELS || x1 > LABELS + this.plotWidth + 8) continue;
      pen.fillStyle = colors.launch;
      pen.beginPath();
      pen.roundRect(x1, y, Math.max(x2 - x1, 2), 14, 4);
      pen.fill();
      const left = Math.max(x1, LABELS) + 5;
      const room = Math.min(x2, LABELS + this.plotWidth) - left - 4;
      const name = run.callName(call);
      if (room > 24) {
        pen.save();
        pen.beginPath();
        pen.rect(left, y, room, 14);
        pen.clip();
        pen.fillStyle = colors.ink;
        pen.fillText(name, left, y + 7.5);
        pen.restore();
      }
    }
  }

  isShown(event) {
    return this.rows.call < 0 || this.run.call[event] === this.rows.call;
  }

  isInView(y) {
    return y > RULER - 12 && y < this.height + 12;
  }

  // Below the line of their row, so that no mark hides them; those of several warps lie on each other.
  drawWaits() {
    const { pen, run, rows, colors } = this;
    const lastX = new Float64Array(rows.list.length).fill(-1);
    for (const isStuck of [false, true]) {
      pen.fillStyle = isStuck ? colors.stuck : colors.wait;
      pen.globalAlpha = isStuck ? 0.85 : 0.6;
      for (const wait of run.waits) {
        if ((run.until[wait] === NEVER) !== isStuck || !this.isShown(wait)) continue;
        const row = rows.ofThread[run.thread[wait]];
        if (row < 0 || !this.isInView(this.heights[row])) continue;
        const [x1, x2] = [this.x(run.step[wait]), this.x(run.end(wait))];
        if (x2 < LABELS || x1 > LABELS + this.plotWidth + 8) continue;
        const width = Math.max(x2 - x1, 1.5);
        if (width < 2 && x1 - lastX[row] < 0.5) continue; // it is there
        lastX[row] = x1;
        pen.fillRect(x1, this.heights[row] + 3.5, width, 5);
      }
    }
    pen.globalAlpha = 1;
  }

  drawArrows(step) {
    const { run, rows } = this;
    const right = LABELS + this.plotWidth + 8;
    const quiet = new Map(); // class of cell -> arrows
    const [loud, underWay] = [[], []];
    let count = 0;
    for (let i = 0; i < run.seen.length; i++) {
      const [stored, seen] = [run.stored[i], run.seen[i]];
      const [from, to] = [rows.ofThread[run.thread[stored]], rows.ofThread[run.thread[seen]]];
      if (from < 0 || to < 0 || !(this.isShown(stored) || this.isShown(seen))) continue;
      const [x1, x2] = [this.x(run.step[stored]), this.x(run.step[seen])];
      if (x2 < LABELS || x1 > right) continue;
      const [y1, y2] = [this.heights[from], this.heights[to]];
      if (Math.max(y1, y2) < RULER || Math.min(y1, y2) > this.height) continue;
      const arrow = [x1, y1, x2, y2, run.cellClass[run.cell[stored]]];
      const isNow = run.step[stored] <= step && step <= run.step[seen];
      if (this.hovered === stored || this.hovered === seen) loud.push(arrow);
      else if (isNow) underWay.push(arrow);
      else if (quiet.has(arrow[4])) quiet.get(arrow[4]).push(arrow);
      else quiet.set(arrow[4], [arrow]);
      count++;
    }
    this.pen.globalAlpha = Math.max(0.1, Math.min(0.5, (0.5 * FAINT_ARROWS) / Math.max(count, 1)));
    this.pen.lineWidth = 1;
    for (const [name, arrows] of quiet) this.strokeArrows(arrows, this.colors[name], count < 1500);
    if (underWay.length <= LOUD_ARROWS) loud.push(...underWay);
    else for (const arrow of underWay) this.strokeArrows([arrow], this.colors[arrow[4]], false);
    this.pen.globalAlpha = 0.95;
    this.pen.lineWidth = 1.6;
    for (const arrow of loud) this.strokeArrows([arrow], this.colors[arrow[4]], true);
    this.pen.globalAlpha = 1;
  }

  strokeArrows(arrows, color, hasHeads) {
    const { pen } = this;
    pen.strokeStyle = pen.fillStyle = color;
    pen.beginPath();
    for (const [x1, y1, x2, y2] of arrows) {
      pen.moveTo(x1, y1);
      if (y1 === y2) pen.quadraticCurveTo((x1 + x2) / 2, y1 - 12, x2, y2); // to another warp of the role
      else pen.lineTo(x2, y2);
    }
    pen.stroke();
    if (!hasHeads) return;
    pen.beginPath();
    for (const [x1, y1, x2, y2] of arrows) {
      const angle = y1 === y2 ? 0.5 : Math.atan2(y2 - y1, x2 - x1);
      pen.moveTo(x2, y2);
      pen.lineTo(x2 - 7 * Math.cos(angle - 0.35), y2 - 7 * Math.sin(angle - 0.35));
      pen.lineTo(x2 - 7 * Math.cos(angle + 0.35), y2 - 7 * Math.sin(angle + 0.35));
    }
    pen.fill();
  }

  // Stores, atomics and fills. Where several fall on one pixel of a row, one is drawn.
  drawEvents() {
    const { pen, run, rows, colors } = this;
    const lastX = [0, 1, 2].map(() => new Float64Array(rows.list.length).fill(-9));
    const first = placeAfter(run.step, this.from - 1);
    const last = placeAfter(run.step, this.to);
    for (let event = first; event < last; event++) {
      const kind = run.kind[event];
      if (kind > KIND.fill || !this.isShown(event)) continue;
      const row = rows.ofThread[run.thread[event]];
      if (row < 0 || !this.isInView(this.heights[row])) continue;
      const x = this.x(run.step[event]);
      const sort = kind === KIND.fill ? 2 : run.isRead[event];
      if (x - lastX[sort][row] < 0.7 && event !== this.hovered) continue;
      lastX[sort][row] = x;
      const y = this.heights[row];
      if (kind === KIND.fill) {
        pen.fillStyle = colors.ink;
        pen.fillRect(x - 0.5, y - 8, 1.2, 7);
        continue;
      }
      const color = colors[run.cellClass[run.cell[event]]];
      pen.beginPath();
      pen.arc(x, y, event === this.hovered ? 4.5 : 2.8, 0, 7);
      pen.fillStyle = run.isRead[event] ? color : colors.panel;
      pen.strokeStyle = color;
      pen.lineWidth = 1.2;
      pen.fill();
      pen.stroke();
    }
  }

  drawCursor(step, height) {
    const { pen, colors } = this;
    pen.fillStyle = colors.cursor;
    pen.fillRect(this.x(step) - 0.75, RULER, 1.5, height);
  }

  drawRuler(width, step) {
    const { pen, colors } = this;
    pen.fillStyle = colors.panel;
    pen.fillRect(0, 0, width, RULER);
    pen.fillStyle = colors.line;
    pen.fillRect(0, RULER - 1, width, 1);
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = colors.soft;
    pen.fillText("emulator steps", 10, RULER / 2);
    const rough = (this.to - this.from) / Math.max(this.plotWidth / 110, 1);
    const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
    const unit = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? power;
    pen.textAlign = "center";
    for (let tick = Math.max(Math.ceil(this.from / unit), 0) * unit; tick <= this.to; tick += unit) {
      const x = this.x(tick);
      if (x < LABELS || Math.abs(x - this.x(step)) < 44) continue;
      pen.fillText(tick.toLocaleString("en"), x, RULER / 2);
      pen.fillRect(x, RULER - 5, 1, 4);
    }
    const x = this.x(step);
    if (x >= LABELS - 1 && x <= width) {
      pen.fillStyle = colors.cursor;
      const text = step.toLocaleString("en");
      const half = pen.measureText(text).width / 2 + 6;
      pen.beginPath();
      pen.roundRect(x - half, 4, 2 * half, RULER - 9, 5);
      pen.fill();
      pen.fillStyle = colors.panel;
      pen.fillText(text, x, RULER / 2);
    }
    pen.textAlign = "left";
  }

  // The event nearest to a point of the canvas, or the wait that lies there; -1 if there is none.
  eventAt(x, y) {
    const { run, rows } = this;
    if (x < LABELS || y < RULER) return -1;
    const near = 6;
    const first = placeAfter(run.step, this.stepAt(x - near) - 1);
    const last = placeAfter(run.step, this.stepAt(x + near));
    let [best, distance] = [-1, near];
    for (let event = first; event < last; event++) {
      const row = rows.ofThread[run.thread[event]];
      if (row < 0 || run.kind[event] >= KIND.wait || !this.isShown(event)) continue;
      const looks = run.kind[event] === KIND.see ? 2 : 0; // a store is nearer than a look
      const from = Math.hypot(this.x(run.step[event]) - x, this.heights[row] - y) + looks;
      if (from < distance) [best, distance] = [event, from];
    }
    if (best >= 0) return best;
    const isHit = (wait) => {
      const row = rows.ofThread[run.thread[wait]];
      const isThere = row >= 0 && y > this.heights[row] + 1 && y < this.heights[row] + 11;
      return isThere && this.isShown(wait) && this.x(run.step[wait]) <= x && x <= Math.max(this.x(run.end(wait)), this.x(run.step[wait]) + 2);
    };
    return run.waits.findLast(isHit) ?? -1;
  }
}
