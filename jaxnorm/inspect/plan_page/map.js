// The map of a row: which thread has which vector, step by step.

const WARP = 32, MOST_VECTORS = 16;
let way, steps, state;

// The steps of a direction: passes over the elements, and between them how the threads come to one sum.
function stepsOf(shown) {
  const passes = shown.passes, own = (step) => passes.filter((pass) => pass.step === step);
  const tiling = passes[0].tiling, warps = Math.ceil(tiling.threads / WARP);
  const segments = own("load")[0].kernel === "segment_sums_kernel";
  const width = Math.min(WARP, tiling.threads);
  const distances = Array.from({length: Math.log2(width)}, (_, i) => width >> (i + 1)).join(", ");
  const group = "Each thread adds up its own elements. " +
    `Then the ${width} threads of ${tiling.threads < WARP ? "the thread group" : "a warp"} add up over shuffles: ` +
    `round by round a thread adds the sum of the one ${distances} places away.`;
  const block = warps > 1
    ? `The ${warps} warps leave their sums in shared memory and meet once. Every warp adds up all of them in one order.`
    : "The thread group lies in one warp, which has its sum: there is nothing to merge.";
  const cluster = segments
    ? `The sums of the ${tiling.blocks} segments go to memory. The second kernel adds them up for each row.`
    : tiling.blocks > 1
      ? `Each of the ${tiling.blocks} blocks sends its sum to the shared memory of all others, where a barrier ` +
        "counts the bytes. Every block adds up all of them in one order."
      : "The row has one block: there is nothing to exchange.";
  return [
    ...own("load").map((pass) => ({name: "load", pass, text: pass.text})),
    {name: "thread group", pass: passes[0], text: group},
    {name: "block", pass: passes[0], text: block},
    {name: segments ? "segments" : "cluster", pass: passes[0], text: cluster},
    ...own("apply").map((pass) => ({name: "apply", pass, text: pass.text})),
    ...own("store").map((pass) => ({name: "store", pass, text: pass.text})),
  ];
}

function beginMap(shown) {
  way = shown;
  byId("map-body").hidden = !way.passes.length;
  byId("no-map").hidden = !way.no_map;
  byId("no-map").textContent = way.no_map || "";
  if (!way.passes.length) return;
  steps = stepsOf(way);
  state = {step: 0, block: 0, warp: 0, thread: 0};
  byId("step").max = steps.length - 1;
  drawMap();
}

function choose(change) {
  Object.assign(state, change);
  const {tiling} = steps[state.step].pass, warps = Math.ceil(tiling.threads / WARP);
  state.block = Math.min(state.block, tiling.blocks - 1);
  state.warp = Math.min(state.warp, warps - 1);
  state.thread = Math.min(state.thread, Math.min(WARP, tiling.threads) - 1);
  drawMap();
}

function setRange(id, value, most, name) {
  const input = byId(id);
  input.max = most;
  input.value = value;
  input.disabled = most === 0;
  byId(`${id}-name`).textContent = name;
}

function drawMap() {
  const {name, pass, text} = steps[state.step], {tiling} = pass, warps = Math.ceil(tiling.threads / WARP);
  setRange("step", state.step, steps.length - 1, `${state.step + 1} of ${steps.length}: ${name}`);
  setRange("block", state.block, tiling.blocks - 1, `${state.block} of ${tiling.blocks}`);
  setRange("warp", state.warp, warps - 1, `${state.warp} of ${warps}`);
  const thread = `${state.warp * WARP + state.thread} of ${tiling.threads}`;
  setRange("thread", state.thread, Math.min(WARP, tiling.threads) - 1, thread);
  byId("back").disabled = state.step === 0;
  byId("next").disabled = state.step === steps.length - 1;
  const about = name === pass.step ? ` (${pass.arrays.join(", ")}; ${pass.via}; ${pass.kernel})` : "";
  byId("step-text").textContent = `${name[0].toUpperCase()}${name.slice(1)}${about}: ${text}`;
  drawStrip(tiling);
  const sums = {"thread group": drawShuffles, "block": drawBlock, "cluster": drawCluster, "segments": drawCluster};
  (sums[name] || drawVectors)(tiling, name);
}

// A colour for each warp, or of rows with many for each block.
const isFine = (tiling) => tiling.blocks * Math.ceil(tiling.threads / WARP) > 64;
const hueOf = (tiling, block, warp, light) => colour(isFine(tiling) ? block : block * 5 + warp, light);

// The whole row.
function drawStrip(tiling) {
  const canvas = byId("row-strip"), scale = window.devicePixelRatio || 1;
  const width = Math.max(200, canvas.clientWidth), height = 51;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d"), style = getComputedStyle(document.body);
  context.scale(scale, scale);
  context.fillStyle = style.getPropertyValue("--panel");
  context.fillRect(0, 0, width, height);
  const light = style.getPropertyValue("--cell").trim(), x = (column) => (column / tiling.cols) * width;
  for (let pixel = 0; pixel < width; ++pixel) {
    const owner = ownerOf(tiling, Math.min(tiling.cols - 1, Math.floor((pixel / width) * tiling.cols)));
    context.fillStyle = hueOf(tiling, owner.block, Math.floor(owner.thread / WARP), light);
    context.fillRect(pixel, 10, 1.5, 30);
  }
  context.fillStyle = style.getPropertyValue("--text");
  for (let block = 1; block < tiling.blocks && tiling.blocks <= 64; ++block)
    context.fillRect(x(block * tiling.span) - 0.5, 4, 1, 42);
  for (const {first, count} of vectorsOf(tiling, state.block, state.warp * WARP + state.thread, 4096)) {
    context.fillRect(x(first), 0, Math.max(1.5, x(count)), 8);
    context.fillRect(x(first), 43, Math.max(1.5, x(count)), 8);
  }
  canvas.setAttribute("aria-label", `The row of ${grouped(tiling.cols)} columns; ` +
    `the marks above and below are the chosen thread's vectors; lines part the blocks`);
}

function vectorsOf(tiling, block, thread, most) {
  const found = [];
  for (let vec = 0; vec < Math.min(tiling.vectors, most); ++vec) {
    const first = firstColumn(tiling, block, thread, vec), count = elementCount(tiling, block, first);
    if (count > 0) found.push({vec, first, count});
  }
  return found;
}

// The vectors of the chosen warp: a column for each thread.
function drawVectors(tiling, name) {
  const width = Math.min(WARP, tiling.threads), begin = state.warp * WARP;
  const shown = Math.min(tiling.vectors, MOST_VECTORS);
  const cells = [];
  for (let lane = 0; lane < width; ++lane) cells.push(element("div", {className: "cell head"}, `t${begin + lane}`));
  for (let vec = 0; vec < shown; ++vec)
    for (let lane = 0; lane < width; ++lane) {
      const first = firstColumn(tiling, state.block, begin + lane, vec);
      const count = elementCount(tiling, state.block, first);
      const range = count === 1 ? `${first}` : `${first}\u2013${first + count - 1}`;
      cells.push(element("button", {
        type: "button", tabIndex: -1, className: `cell${count ? "" : " none"}${lane === state.thread ? " chosen" : ""}`,
        style: count ? `background: ${hueOf(tiling, state.block, state.warp)}` : "",
        title: count ? `thread ${begin + lane}, vector ${vec}: columns ${range}` : "past the end of the row",
        onclick: () => choose({thread: lane}),
      }, count ? `${first}` : "\u2013"));
    }
  const heading = `Warp ${state.warp}, ${name}: ${many(tiling.vectors, "vector")} a thread (their first columns)`;
  showCells(heading, cells, width);
  const vectors = vectorsOf(tiling, state.block, begin + state.thread, 8);
  const ranges = vectors.map(({first, count}) => count === 1 ? `${first}` : `${first} to ${first + count - 1}`);
  if (tiling.vectors > 8 && vectors.length === 8) ranges.push("...");
  byId("thread-text").textContent = vectors.length
    ? `Thread ${begin + state.thread} of block ${state.block} has columns ${ranges.join(", ")}.` +
      (tiling.vectors > shown ? ` ${many(tiling.vectors - shown, "further vector")} of each thread are not drawn.` : "")
    : `Thread ${begin + state.thread} of block ${state.block} has no column: the row ends before.`;
}

function showCells(heading, cells, width) {
  byId("detail-heading").textContent = heading;
  const style = `grid-template-columns: repeat(${width}, minmax(2rem, 1fr))`;
  byId("detail").replaceChildren(element("div", {className: "cells", style}, ...cells));
}

// How many threads' sums each thread has after each round of shuffles.
function drawShuffles(tiling) {
  const width = Math.min(WARP, tiling.threads), cells = [];
  for (let lane = 0; lane < width; ++lane)
    cells.push(element("div", {className: "cell head"}, `t${state.warp * WARP + lane}`));
  for (let distance = width; distance >= 1; distance /= 2)
    for (let lane = 0; lane < width; ++lane) {
      // After the round with this distance the sums of threads that are alike in the lower bits are one.
      const sum = lane % distance, partner = distance < width ? lane ^ distance : lane;
      cells.push(element("div", {
        className: `cell${lane === state.thread ? " chosen" : ""}`,
        style: `background: ${colour(sum * 3 + Math.log2(distance))}`,
        title: `thread ${lane} has ${distance < width ? `added the sum of thread ${partner}` : "its own sum"}`,
      }, `${width / distance}`));
    }
  showCells("Of how many threads each has the sum, round by round", cells, width);
  byId("thread-text").textContent = `Thread ${state.thread} takes the sums of threads ` +
    `${Array.from({length: Math.log2(width)}, (_, i) => state.thread ^ (width >> (i + 1))).join(", ")}, in this order.`;
}

const sumCell = (text, background, chosen) =>
  element("div", {className: `cell${chosen ? " chosen" : ""}`, style: `background: ${background}`}, text);

function drawBlock(tiling) {
  const warps = Math.ceil(tiling.threads / WARP), cells = [];
  for (let warp = 0; warp < warps; ++warp)
    cells.push(sumCell(`warp ${warp}`, hueOf(tiling, state.block, warp), warp === state.warp));
  for (let warp = 0; warp < warps; ++warp)
    cells.push(sumCell(warps > 1 ? "all" : "sum", colour(2), false));
  showCells(warps > 1 ? "Sums of the warps, and after they met" : "The sum of the thread group", cells, warps);
  byId("thread-text").textContent = warps > 1 ? "One barrier of the block for each sum." : "";
}

function drawCluster(tiling) {
  const cells = [], shown = Math.min(tiling.blocks, 64);
  for (let block = 0; block < shown; ++block)
    cells.push(sumCell(`b${block}`, hueOf(tiling, block, 0), block === state.block));
  for (let block = 0; block < shown; ++block)
    cells.push(sumCell("all", colour(2), false));
  showCells(tiling.blocks > 1 ? "Sums of the blocks, and after the exchange" : "One block", cells, Math.min(shown, 32));
  byId("thread-text").textContent = tiling.blocks > shown ? `The first ${shown} of ${tiling.blocks} are drawn.` : "";
}

let timer = 0;

function play(on) {
  clearInterval(timer);
  byId("play").setAttribute("aria-pressed", String(on));
  byId("play").textContent = on ? "Stop" : "Play";
  if (on) timer = setInterval(() => choose({step: (state.step + 1) % steps.length}), 1500);
}

function wireMap() {
  for (const id of ["step", "block", "warp", "thread"])
    byId(id).addEventListener("input", (event) => choose({[id]: Number(event.target.value)}));
  byId("back").addEventListener("click", () => choose({step: state.step - 1}));
  byId("next").addEventListener("click", () => choose({step: state.step + 1}));
  byId("play").addEventListener("click", () => play(byId("play").getAttribute("aria-pressed") !== "true"));
  window.addEventListener("resize", () => {
    if (!way) return;
    drawRuler(way);
    if (way.passes.length) drawStrip(steps[state.step].pass.tiling);
  });
}
