"use strict";
// The rows of the timeline: a rank, below it its roles, below an open role its warps.

class Rows {
  constructor(run) {
    this.run = run;
    this.call = -1; // the one that is shown alone; -1 for all
    this.closedRanks = new Set(run.numRanks > 4 ? run.threads.map(([rank]) => rank) : []);
    this.openRoles = new Set();
    this.build();
  }

  build() {
    const { run } = this;
    const isShown = new Uint8Array(run.threads.length);
    for (let i = 0; i < run.count; i++) {
      if (this.call < 0 || run.call[i] === this.call) isShown[run.thread[i]] = 1;
    }
    const ranks = new Map(); // rank -> role -> threads
    for (const [rank] of run.launches) if (!ranks.has(rank)) ranks.set(rank, new Map());
    run.threads.forEach(([rank, role], thread) => {
      if (!isShown[thread]) return;
      if (!ranks.has(rank)) ranks.set(rank, new Map());
      const roles = ranks.get(rank);
      if (!roles.has(role)) roles.set(role, []);
      roles.get(role).push(thread);
    });
    this.list = [];
    this.ofThread = new Int32Array(run.threads.length).fill(-1);
    this.ofRank = new Map();
    for (const [rank, roles] of [...ranks].sort(([a], [b]) => this.order(a) - this.order(b))) {
      this.addRank(rank, roles);
    }
  }

  // A rank's NIC comes right after the rank.
  order(rank) {
    return rank >= this.run.nicNumbers ? rank - this.run.nicNumbers + 0.5 : rank;
  }

  addRank(rank, roles) {
    const isOpen = !this.closedRanks.has(rank);
    this.ofRank.set(rank, this.list.length);
    this.add({ kind: "rank", rank, label: this.run.rankName(rank), isOpen, height: isOpen ? 24 : 38 }, isOpen ? [] : [...roles.values()].flat());
    if (!isOpen) return;
    for (const [role, threads] of roles) {
      const key = `${rank} ${role}`;
      const isOpenRole = this.openRoles.has(key);
      this.add({ kind: "role", rank, label: role, key, isOpen: isOpenRole, height: 24 }, isOpenRole ? [] : threads);
      if (!isOpenRole) continue;
      for (const thread of [...threads].sort((a, b) => this.place(a) - this.place(b))) {
        const [, , block, warp] = this.run.threads[thread];
        this.add({ kind: "warp", rank, label: `block ${block}, warp ${warp}`, height: 20 }, [thread]);
      }
    }
  }

  add(row, threads) {
    row.top = this.list.length ? this.list.at(-1).top + this.list.at(-1).height : 0;
    row.number = this.list.length;
    row.threads = threads;
    for (const thread of threads) this.ofThread[thread] = row.number;
    this.list.push(row);
  }

  place(thread) {
    const [, , block, warp] = this.run.threads[thread];
    return block * 64 + warp;
  }

  get height() {
    return this.list.length ? this.list.at(-1).top + this.list.at(-1).height : 0;
  }

  at(y) {
    return this.list.find((row) => y >= row.top && y < row.top + row.height);
  }

  toggle(row) {
    const set = row.kind === "rank" ? this.closedRanks : this.openRoles;
    const key = row.kind === "rank" ? row.rank : row.key;
    if (row.kind === "warp") return;
    if (!set.delete(key)) set.add(key);
    this.build();
  }
}
