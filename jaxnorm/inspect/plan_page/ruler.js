// The rule: row lengths on a ruler, and the launch that follows.

const HUES = {"rows per block": 205, "block per row": 150, "cluster per row": 35, "segments": 285, "looped": 0};

function drawRuler(way) {
  const width = Math.max(300, byId("ruler").clientWidth), height = 92, left = 6, right = width - 6;
  const cols = data.call.cols;
  const end = way.ruler[way.ruler.length - 1].to, place = (n) => left + (right - left) * Math.log2(n) / Math.log2(end);
  const drawing = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": "Row lengths and their rules",
  });
  way.ruler.forEach((mark, i) => {
    const begin = i === 0 ? left : place(mark.from);
    const stop = i + 1 < way.ruler.length ? place(way.ruler[i + 1].from) : right;
    const own = mark.from <= cols && cols <= mark.to;
    const band = svg("rect", {
      class: "band", x: begin, y: 26, width: Math.max(1, stop - begin - 1), height: 34, tabindex: 0, role: "button",
      fill: `hsl(${HUES[mark.regime]} 55% ${own ? 50 : 68}%)`, "aria-label": markText(mark),
    });
    const tell = () => { byId("ruler-text").textContent = markText(mark); };
    for (const event of ["mouseenter", "focus", "click"]) band.addEventListener(event, tell);
    drawing.append(band);
  });
  for (let power = 0; 2 ** power <= end; power += width < 700 ? 6 : 3) {
    const x = place(2 ** power), anchor = power === 0 ? "start" : x > right - 30 ? "end" : "middle";
    drawing.append(svg("text", {class: "tick", x, y: 78, "text-anchor": anchor}, grouped(2 ** power)));
  }
  const at = place(Math.max(1, cols));
  drawing.append(svg("path", {d: `M${at} 62 l-6 -40 h12 z`, fill: "var(--text)"}));
  const x = Math.min(right - 55, Math.max(60, at));
  drawing.append(svg("text", {x, y: 16, "text-anchor": "middle", "font-weight": 700}, `${grouped(cols)} columns`));
  byId("ruler").replaceChildren(drawing, legend(way));
  byId("ruler-text").textContent = markText(way.ruler.find((mark) => mark.from <= cols && cols <= mark.to));
  const rows = way.ruler.map((mark) => [`${grouped(mark.from)} to ${grouped(mark.to)}`, mark.regime, mark.rule]);
  byId("ruler-table").replaceChildren(table(["columns", "regime", "rule"], rows));
}

function legend(way) {
  const regimes = [...new Set(way.ruler.map((mark) => mark.regime))];
  return element("p", {className: "soft legend"}, ...regimes.map((regime) => element("span", {},
    element("span", {className: "swatch", style: `background: hsl(${HUES[regime]} 55% 60%)`}), regime)),
    "on a logarithmic scale");
}

const markText = (mark) => `${grouped(mark.from)} to ${grouped(mark.to)} columns: ${mark.regime}, ${mark.rule}`;

function drawLaunch(way) {
  byId("launch").hidden = byId("traffic").hidden = !way.kernels.length;
  byId("why").replaceChildren(...way.why.map((sentence) => element("li", {}, sentence)));
  byId("slower").hidden = !way.slower;
  byId("slower").textContent =
    `By default jax.numpy runs here, because ${way.slower}. The plan is that of implementation="native".`;
  const rows = {
    "blocks": (kernel) => (kernel.is_most ? "at most " : "") + grouped(kernel.blocks),
    "cluster": (kernel) => kernel.cluster > 1 ? `${kernel.cluster} blocks` : "none",
    "threads a block": (kernel) => grouped(kernel.threads),
    "registers a thread (the budget)": (kernel) => kernel.registers ? `at most ${kernel.registers}` : "no bound",
    "dynamic shared memory a block": (kernel) => kernel.shared ? bytes(kernel.shared) : "none",
  };
  byId("kernels").replaceChildren(table(["kernel", ...way.kernels.map((kernel) => kernel.name)],
    Object.entries(rows).map(([what, say]) => [what, ...way.kernels.map(say)])));
  drawFlight(way);
  byId("small").hidden = !way.small_batch;
  byId("small").textContent = way.small_batch || "";
}

function drawFlight(way) {
  const [least, enough] = data.needed, kernel = way.kernels.find((each) => each.in_flight);
  if (!kernel) {
    const said = way.kernels.length ? "How many bytes are on their way is left to the compiler here." : "";
    byId("flight").replaceChildren(element("p", {className: "soft"}, said));
    return;
  }
  const most = Math.max(enough, kernel.in_flight) * 1.1, percent = (count) => `${100 * count / most}%`;
  byId("flight").replaceChildren(
    element("p", {}, `On their way to a multiprocessor at once: up to ${bytes(kernel.in_flight)}. ` +
      `${bytes(least)} to ${bytes(enough)} (the dashed frame) keep the memory busy; more was measured to be slower.`),
    element("div", {className: "bar", role: "img", "aria-label": "bytes on their way, and what is needed"},
      element("span", {style: `width: ${percent(kernel.in_flight)}`}),
      element("span", {className: "need", style: `left: ${percent(least)}; width: ${percent(enough - least)}`})));
}

function drawTraffic(way) {
  const total = (key) => way.traffic.reduce((sum, entry) => sum + entry[key], 0);
  const moved = total("bytes"), ideal = total("ideal"), most = Math.max(...way.traffic.map((entry) => entry.bytes), 1);
  byId("traffic-text").textContent = `${bytes(moved)} are moved. Each input read once and each output written once ` +
    `would be ${bytes(ideal)}` + (moved ? `, ${(100 * ideal / moved).toFixed(1)} % of that.` : ".");
  byId("traffic-bars").replaceChildren(...way.traffic.flatMap((entry) => [
    element("div", {}, `${entry.array} ${entry.how}: ${bytes(entry.bytes)}` +
      (entry.times > 1 ? ` in ${entry.times} times` : "") + (entry.why ? `: ${entry.why}` : "")),
    element("div", {className: "bar", role: "img", "aria-label": `${entry.array}: ideally ${bytes(entry.ideal)}`},
      element("span", {style: `width: ${100 * entry.bytes / most}%`}),
      element("span", {className: "ideal", style: `width: ${100 * entry.ideal / most}%`})),
  ]));
}
