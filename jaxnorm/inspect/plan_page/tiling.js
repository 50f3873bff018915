// The map of a row. The numbers of a tiling come from Python, where a test holds them to the kernels.

// The first column of a vector of a thread; it may be past the block's columns.
function firstColumn(tiling, block, thread, vec) {
  const warp = Math.floor(thread / tiling.lanes), lane = thread % tiling.lanes;
  return block * tiling.span + (warp * tiling.vectors * tiling.lanes + vec * tiling.lanes + lane) * tiling.vector;
}

// How many elements of the row that vector has.
function elementCount(tiling, block, first) {
  const end = Math.min(tiling.cols, (block + 1) * tiling.span);
  return Math.max(0, Math.min(tiling.vector, end - first));
}

// Calls f(block, thread, vec, first, count) for each vector that has elements.
function eachVector(tiling, f) {
  for (let block = 0; block < tiling.blocks; ++block)
    for (let thread = 0; thread < tiling.threads; ++thread)
      for (let vec = 0; vec < tiling.vectors; ++vec) {
        const first = firstColumn(tiling, block, thread, vec), count = elementCount(tiling, block, first);
        if (count > 0) f(block, thread, vec, first, count);
      }
}

// Whose a column is, by going through the row the other way round: from the column to its thread.
function ownerOf(tiling, column) {
  const block = Math.floor(column / tiling.span), unit = Math.floor((column % tiling.span) / tiling.vector);
  const warp = Math.floor(unit / (tiling.vectors * tiling.lanes)), rest = unit % (tiling.vectors * tiling.lanes);
  return {block, thread: warp * tiling.lanes + (rest % tiling.lanes), vec: Math.floor(rest / tiling.lanes)};
}

// Helpers of the page.
const byId = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made && key !== "style" && key !== "list") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function svg(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function table(head, rows, numbers = []) {
  const cell = (name) => (text, i) => element(name, {className: numbers.includes(i) ? "number" : ""}, text);
  return element(
    "table", {},
    element("thead", {}, element("tr", {}, ...head.map(cell("th")))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell("td"))))),
  );
}

const grouped = (number) => number.toLocaleString("en").replace(/,/g, "\u202f");

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (count >= 1024 && i < units.length - 1) count /= 1024, ++i;
  return `${Number(count.toPrecision(4))} ${units[i]}`;
}

const many = (count, what) => `${grouped(count)} ${what}${count === 1 ? "" : "s"}`;

// A hue for each of so many warps or blocks, neighbours far apart.
const colour = (i, light = "var(--cell)") => `hsl(${(i * 137.5 + 210) % 360} 60% ${light})`;
