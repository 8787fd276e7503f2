"use strict";
// What each row of the timeline does at a step, and the source of one of them.

const KEYWORDS =
  /(#.*$)|("""[\s\S]*?(?:"""|$)|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(def|return|if|elif|else|while|for|in|and|or|not|is|None|True|False|break|continue|pass|import|from|with|as|raise|lambda|class)\b/gm;

function escaped(text) {
  return text.replace(/[&<>"]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[sign]);
}

// Python source as HTML, a string for each line.
function highlighted(text) {
  const wrap = (part, name) => part.split("\n").map((piece) => `<span class="${name}">${escaped(piece)}</span>`).join("\n");
  let [html, end] = ["", 0];
  for (const match of text.matchAll(KEYWORDS)) {
    html += escaped(text.slice(end, match.index)) + wrap(match[0], match[1] ? "comment" : match[2] ? "text" : "keyword");
    end = match.index + match[0].length;
  }
  return (html + escaped(text.slice(end))).split("\n");
}

class Now {
  constructor(run, rows) {
    Object.assign(this, { run, rows });
    this.body = document.querySelector("#now tbody");
    this.where = document.querySelector("#source .where");
    this.code = document.querySelector("#source pre");
    this.chosen = ""; // the row whose source is shown: rank and label
    this.depth = null; // 0 for the innermost line, 1 for its caller; null for that of the role
  }

  // For each row that runs at a step: { row, event, state, text }, state "runs", "waits", "hangs" or "left".
  at(step) {
    const { run, rows } = this;
    const running = new Set();
    for (const launch of run.launches) {
      if (launch[2] <= step && step <= run.launchEnd(launch)) running.add(`${launch[0]} ${launch[1]}`);
    }
    const waits = rows.list.map(() => []);
    for (const wait of run.openWaits(step)) {
      const row = rows.ofThread[run.thread[wait]];
      if (row >= 0) waits[row].push(wait);
    }
    const states = [];
    rows.list.forEach((row, number) => {
      const isLive = (event) => event >= 0 && running.has(`${row.rank} ${run.call[event]}`);
      const lasts = row.threads.map((thread) => run.lastOf(thread, step)).filter(isLive);
      const open = waits[number].filter(isLive);
      const there = lasts.filter((event) => !run.hasLeft(event, step));
      if (there.length) states.push(this.stateOf(row, there, open));
      else if (lasts.length) states.push({ row, event: Math.max(...lasts), state: "left", text: "has left the kernel" });
    });
    return states;
  }

  stateOf(row, lasts, open) {
    const { run } = this;
    const warps = new Set(open.map((wait) => run.thread[wait]));
    const stuck = open.filter((wait) => run.until[wait] === NEVER);
    const others = lasts.length > 1 && warps.size ? ` · ${warps.size} of ${lasts.length} warps wait` : "";
    if (stuck.length || warps.size >= lasts.length) {
      const event = this.telling(stuck.length ? stuck : open);
      return { row, event, state: stuck.length ? "hangs" : "waits", text: run.words(event) + others };
    }
    const isOver = (event) => !open.includes(event);
    const event = Math.max(...lasts.filter(isOver));
    const hasWaited = run.kind[event] === KIND.wait ? `goes on: ${run.cellName(event)} was ${run.value[event]}` : "";
    return { row, event, state: "runs", text: (hasWaited || run.words(event)) + others };
  }

  // What has stopped the run; the latest wait for a cell that has a name; else one for any cell; else one at a barrier.
  telling(waits) {
    const hasCell = (wait) => this.run.kind[wait] === KIND.wait;
    const hasName = (wait) => hasCell(wait) && !this.run.cells[this.run.cell[wait]][1].includes("[byte ");
    return waits.find((wait) => this.run.kind[wait] === KIND.finding) ?? waits.findLast(hasName) ?? waits.findLast(hasCell) ?? waits.at(-1);
  }

  draw(step) {
    const { run } = this;
    const states = this.at(step);
    const keyOf = ({ row }) => `${row.rank} ${row.label}`;
    const chosen = states.find((state) => keyOf(state) === this.chosen) ?? this.firstChoice(states);
    const lines = states.map((each) => {
      const line = run.roleLineOf(each.event);
      const code = line ? `${line.file.split("/").pop()}:${line.number}  ${codeOf(line)}` : "";
      const role = each.row.kind === "rank" ? "all roles" : each.row.label;
      const mark = `${each.state}${each === chosen ? " chosen" : ""}`;
      const cells = [run.rankName(each.row.rank), role, each.text, code].map((text) => `<td title="${escaped(text)}">${escaped(text)}</td>`);
      return `<tr class="${mark}" data-key="${escaped(keyOf(each))}">${cells.join("")}</tr>`;
    });
    const nothing = '<tr class="none"><td colspan="4">No kernel runs at this step.</td></tr>';
    this.body.innerHTML = lines.join("") || nothing;
    this.drawSource(chosen);
  }

  // Who hangs; if nobody does, whoever has just done something.
  firstChoice(states) {
    const hanging = states.filter(({ state }) => state === "hangs");
    const among = hanging.length ? hanging : states;
    return among.reduce((best, state) => (best && best.event >= state.event ? best : state), undefined);
  }

  drawSource(state) {
    const lines = state ? this.run.linesOf(state.event) : [];
    const line = lines[Math.min(this.depth ?? this.run.roleLines[this.run.stack[state?.event]], lines.length - 1)];
    if (!line) {
      this.where.textContent = state ? "The emulator's copy engine: no line of a kernel." : "";
      this.code.textContent = "";
      return;
    }
    const buttons = lines.map((each, depth) => {
      const pressed = each.function === line.function && each.number === line.number;
      return `<button data-depth="${depth}" aria-pressed="${pressed}">${escaped(each.function)}:${each.number}</button>`;
    });
    this.where.innerHTML = `${escaped(line.file)}<br>${buttons.join(" ‹ ")}`;
    const rows = highlighted(line.text).map((html, i) => {
      const number = line.begin + i;
      return `<span class="row${number === line.number ? " here" : ""}" data-number="${number}">${html || " "}</span>`;
    });
    this.code.innerHTML = line.text ? rows.join("") : "The source is not there.";
    const here = this.code.querySelector(".here");
    if (here) this.code.scrollTop = here.offsetTop - this.code.offsetTop - this.code.clientHeight / 2;
  }
}
