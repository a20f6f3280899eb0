"use strict";
// Runs behind the page and behind axe, and leaves what it found as JSON in an element of its own.
addEventListener("load", async () => {
  const root = document.documentElement;
  const count = (what) => document.querySelectorAll(`main ${what}`).length;
  const found = {
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    width: root.clientWidth,
    overflow: root.scrollWidth - root.clientWidth,
    rows: count("tr"),
    pictures: count("svg"),
    problems,
  };
  const axed = await axe.run();
  for (const { id, impact, nodes } of axed.violations) {
    problems.push(`axe: ${impact} ${id} at ${nodes.map((node) => node.target).join(", ")}`);
  }
  for (const table of document.querySelectorAll("table")) {
    const rows = () => [...table.tBodies[0].rows];
    if (rows().length < 2) continue;
    for (const head of [...table.tHead.rows[0].cells].filter((it) => it.textContent.trim())) {
      head.querySelector("button").click();
      const key = (row) => row.cells[head.cellIndex];
      const keys = rows().map(key).map((it) => it.dataset.sort ?? it.textContent);
      const less = (one, other) => (/^\d+$/.test(one) ? BigInt(one) > BigInt(other) : one > other);
      const isSorted = keys.every((it, at) => at === 0 || !less(keys[at - 1], it));
      if (!isSorted || head.ariaSort !== "ascending") {
        problems.push(`a table is not sorted by ${head.textContent}`);
      }
    }
  }
  const said = document.createElement("pre");
  said.id = "probe";
  said.textContent = JSON.stringify(found);
  document.body.append(said);
});
