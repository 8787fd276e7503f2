"use strict";
// The run: the columns of the page's data, and what can be asked of them.

const KIND = { store: 0, atomic: 1, fill: 2, see: 3, wait: 4, hang: 5, finding: 6 };
const NEVER = -1;

// The first place of a sorted array whose value is more than `value`.
function placeAfter(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

class Run {
  constructor(data) {
    Object.assign(this, data);
    const { events } = data;
    this.count = events.step.length;
    this.step = Int32Array.from(events.step);
    for (let i = 1; i < this.count; i++) this.step[i] += this.step[i - 1];
    for (const name of ["kind", "thread", "lane", "call", "cell", "order", "until", "stack"]) {
      this[name] = Int32Array.from(events[name]);
    }
    this.value = events.value;
    this.stored = Int32Array.from(data.readings.stored);
    this.seen = Int32Array.from(data.readings.seen);
    this.isRead = new Uint8Array(this.count);
    for (const event of this.stored) this.isRead[event] = 1;
    this.waits = [];
    this.ofWarp = new Map(); // a warp has one role after the other
    this.warps = this.threads.map(([rank, , block, warp]) => `${rank} ${block} ${warp}`);
    for (const warp of this.warps) this.ofWarp.set(warp, []);
    for (let i = 0; i < this.count; i++) {
      this.ofWarp.get(this.warps[this.thread[i]]).push(i);
      if (this.kind[i] >= KIND.wait) this.waits.push(i);
    }
    this.cellClass = this.cells.map(([, text]) => classOfCell(text));
    this.leftAt = new Map(data.exits.map(([rank, call, block, warp, step]) => [`${rank} ${block} ${warp} ${call}`, step]));
    this.spans = this.calls.map((_, call) => this.spanOf(call));
  }

  get firstStep() {
    return Math.min(this.lastStep, ...this.launches.map((launch) => launch[2]));
  }

  // Where the page opens, so that no part of it is empty: at the end if somebody hangs or something is found, else where the first slot is filled.
  get openingStep() {
    if (this.waits.some((wait) => this.until[wait] === NEVER)) return this.lastStep;
    return this.count ? this.step[Math.max(this.kind.indexOf(KIND.fill), 0)] : this.firstStep;
  }

  // The step at which a wait ends; the end of the run if it never does.
  end(wait) {
    return this.until[wait] === NEVER ? this.lastStep : this.until[wait];
  }

  launchEnd(launch) {
    return launch[3] === NEVER ? this.lastStep : launch[3];
  }

  // From the first launch of a call to the end of its last one, on all ranks.
  spanOf(call) {
    const mine = this.launches.filter((launch) => launch[1] === call);
    return [Math.min(...mine.map((launch) => launch[2])), Math.max(...mine.map((launch) => this.launchEnd(launch)))];
  }

  // The last event of a warp that is not after a step; -1 if there is none, or the warp has another role now.
  lastOf(thread, step) {
    const mine = this.ofWarp.get(this.warps[thread]);
    let low = 0;
    let high = mine.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.step[mine[middle]] > step) high = middle;
      else low = middle + 1;
    }
    return low && this.thread[mine[low - 1]] === thread ? mine[low - 1] : -1;
  }

  // Whether the warp of an event has left its kernel by a step.
  hasLeft(event, step) {
    return this.leftAt.get(`${this.warps[this.thread[event]]} ${this.call[event]}`) <= step;
  }

  openWaits(step) {
    return this.waits.filter((wait) => this.step[wait] <= step && (step < this.end(wait) || this.until[wait] === NEVER));
  }

  rankName(rank) {
    return rank >= this.nicNumbers ? `NIC ${rank - this.nicNumbers}` : `rank ${rank}`;
  }

  callName(call) {
    const [kernel, number] = this.calls[call];
    return this.calls.some(([other, its]) => other === kernel && its !== number) ? `${kernel} ${number}` : kernel;
  }

  threadName(thread) {
    const [rank, role, block, warp] = this.threads[thread];
    return `${this.rankName(rank)}, ${role}, block ${block}, warp ${warp}`;
  }

  cellName(event) {
    const [owner, text] = this.cells[this.cell[event]];
    return owner === this.threads[this.thread[event]][0] ? text : `${text} of ${this.rankName(owner)}`;
  }

  // What an event is, in a few words.
  words(event) {
    const cell = this.cellName(event);
    const value = this.value[event];
    const order = this.orders[this.order[event]];
    const suffix = order ? ` (${order})` : "";
    const forEver = this.until[event] === NEVER;
    switch (this.kind[event]) {
      case KIND.store: return `stores ${cell} = ${value}${suffix}`;
      case KIND.atomic: return `makes ${cell} ${value}${suffix}`;
      case KIND.fill: return `fills ${cell}`;
      case KIND.see: return `sees ${cell} = ${value}${suffix}`;
      case KIND.wait: return `waits ${forEver ? "for ever" : `${this.end(event) - this.step[event]} steps`} for ${cell}, sees ${value}`;
      case KIND.finding: return `${cell}: ${value}`;
      default: return `hangs at ${cell}: ${value} have come`;
    }
  }

  // The line of the role's own code where an event happened, not that of a helper; undefined if there is no line.
  roleLineOf(event) {
    return this.linesOf(event)[this.roleLines[this.stack[event]]];
  }

  // The lines where an event happened, innermost first: { file, function, begin, text, number }.
  linesOf(event) {
    return this.stacks[this.stack[event]].map((line) => {
      const [source, number] = this.lines[line];
      return { ...this.sources[source], number };
    });
  }
}

function classOfCell(text) {
  if (/^(tail|counts)\b/.test(text)) return "tail";
  if (/^(head|credits)\b/.test(text)) return "head";
  if (/^(shared|board|mbarrier)\b/.test(text)) return "shared";
  return "other";
}

function codeOf(line) {
  return (line.text.split("\n")[line.number - line.begin] ?? "").trim();
}
