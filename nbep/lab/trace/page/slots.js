"use strict";
// What is in the slots of rings, halves and send queues at a step.

const EMPTY = 0;
const FILLING = 1;
const RANK_COLORS = ["#4477aa", "#cc6677", "#228833", "#b8860b", "#66a5c9", "#aa3377", "#8a8a8a", "#a5673f"];

class Slots {
  constructor(run, rows, colors) {
    Object.assign(this, { run, rows, colors });
    this.scroll = document.querySelector("#slots .scroll");
    this.canvas = this.scroll.querySelector("canvas");
    this.boxes = []; // of the last drawing: [x, y, size, text, content, row]
  }

  // The states and contents of a row of slots at a step.
  statesAt(row, step) {
    const states = new Uint8Array(row.count);
    const texts = new Array(row.count).fill("");
    const [steps, slots, kinds, contents] = row.changes;
    const last = placeAfter(steps, step);
    for (let i = 0; i < last; i++) {
      const slot = slots[i];
      states[slot] = kinds[i];
      if (kinds[i] === EMPTY) texts[slot] = "";
      else if (contents[i] && !texts[slot].startsWith("token")) texts[slot] = contents[i];
    }
    return { states, texts };
  }

  // Rows of slots that are in use at a step.
  at(step) {
    const call = this.rows.call < 0 ? null : this.run.calls[this.rows.call];
    return this.run.slots
      .filter((row) => row.begin <= step && step <= row.end)
      .filter((row) => !call || !row.kernel || (row.kernel === call[0] && row.call === call[1]))
      .sort((a, b) => a.rank - b.rank);
  }

  // How many slots of each row are published: { "rank 1: ring from rank 0, channel 0": 3 }.
  fillsAt(step) {
    const name = (row) => `${this.run.rankName(row.rank)}: ${row.title}`;
    const count = (row) => this.statesAt(row, step).states.filter((state) => state > FILLING).length;
    return Object.fromEntries(this.at(step).map((row) => [name(row), count(row)]));
  }

  draw(step) {
    const rows = this.at(step);
    const width = this.scroll.clientWidth;
    const lines = [];
    let [y, rank] = [4, null];
    for (const row of rows) {
      if (row.rank !== rank) {
        if (rank !== null) y += 8;
        lines.push({ heading: this.run.rankName(row.rank), y });
        y += 18;
        rank = row.rank;
      }
      const size = row.count > 16 ? 8 : 13;
      const perLine = Math.max(Math.floor((width - 24) / (size + 3)), 1);
      lines.push({ row, y, size, perLine });
      y += 17 + Math.ceil(row.count / perLine) * (size + 3) + 5;
    }
    const pen = fitted(this.canvas, width, Math.max(y + 8, 40));
    this.boxes = [];
    pen.textBaseline = "top";
    if (!rows.length) {
      pen.fillStyle = this.colors.soft;
      pen.font = "12px system-ui, sans-serif";
      pen.fillText("No ring, half or queue is in use at this step.", 12, 8);
    }
    for (const line of lines) {
      if (line.heading) {
        pen.fillStyle = this.colors.ink;
        pen.font = "600 12px system-ui, sans-serif";
        pen.fillText(line.heading, 12, line.y);
      } else this.drawRow(pen, line, step, width);
    }
  }

  drawRow(pen, { row, y, size, perLine }, step, width) {
    const { colors } = this;
    const { states, texts } = this.statesAt(row, step);
    const full = states.filter((state) => state > FILLING).length;
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = colors.soft;
    pen.fillText(row.title, 12, y);
    pen.textAlign = "right";
    pen.fillText(`${full} of ${row.count}`, width - 12, y);
    pen.textAlign = "left";
    const color = RANK_COLORS[row.source % RANK_COLORS.length];
    states.forEach((state, slot) => {
      const left = 12 + (slot % perLine) * (size + 3);
      const top = y + 16 + Math.floor(slot / perLine) * (size + 3);
      pen.beginPath();
      pen.roundRect(left + 0.5, top + 0.5, size - 1, size - 1, 3);
      pen.strokeStyle = state === EMPTY ? colors.line : color;
      pen.fillStyle = color;
      pen.globalAlpha = state === FILLING ? 0.35 : 1;
      if (state !== EMPTY) pen.fill();
      pen.globalAlpha = 1;
      pen.stroke();
      this.boxes.push([left, top, size, `${row.title}, slot ${slot}: ${["free", "being filled", "published"][state]}`, texts[slot], row]);
    });
  }

  boxAt(x, y) {
    return this.boxes.find(([left, top, size]) => x >= left && x < left + size + 2 && y >= top && y < top + size + 2);
  }
}
