// The example to do by hand: few short rows, few threads, every partial sum shown.

const example = {rows: 3, cols: 8, threads: 4, epsilon: 1e-6, kind: "", values: []};

// What rows begin with, by the column.
const beginnings = [(col) => col + 1, (col) => (col % 2 ? -2 : 2), (col) => col * 0.5 - 1];

function fillExample() {
  while (example.values.length < example.rows) example.values.push([]);
  example.values.length = example.rows;
  example.values.forEach((row, r) => {
    while (row.length < example.cols) row.push(beginnings[r % beginnings.length](row.length));
    row.length = example.cols;
  });
}

// Sums of the threads, then of the tree: each round adds the upper half to the lower.
function sumByThreads(terms, threads) {
  const partials = Array(threads).fill(0);
  terms.forEach((term, col) => { partials[col % threads] += term; });
  const rounds = [partials];
  while (rounds[rounds.length - 1].length > 1) {
    const last = rounds[rounds.length - 1], half = Math.ceil(last.length / 2);
    rounds.push(Array.from({length: half}, (_, i) => last[i] + (i + half < last.length ? last[i + half] : 0)));
  }
  return {rounds, total: rounds[rounds.length - 1][0]};
}

function normaliseRow(values, threads, epsilon, kind) {
  const sums = [];
  let mean = 0;
  if (kind === "layer") {
    const sum = sumByThreads(values, threads);
    mean = sum.total / values.length;
    sums.push({what: "sum of x", ...sum, then: `mean = ${show(sum.total)} / ${values.length} = ${show(mean)}`});
  }
  const centred = values.map((value) => value - mean);
  const squares = sumByThreads(centred.map((value) => value * value), threads);
  const variance = squares.total / values.length, rstd = 1 / Math.sqrt(variance + epsilon);
  sums.push({
    what: kind === "layer" ? "sum of (x \u2212 mean)\u00b2" : "sum of x\u00b2", ...squares,
    then: `rstd = 1 / \u221a(${show(squares.total)} / ${values.length} + ${epsilon}) = ${show(rstd)}`,
  });
  return {sums, mean, rstd, y: centred.map((value) => value * rstd)};
}

const show = (number) => String(Number(number.toPrecision(5)));

function numberInput(label, key, least, most, step = 1) {
  return element("label", {className: "small"}, label, element("input", {
    type: "number", min: least, max: most, step, value: example[key],
    oninput: (event) => {
      const value = Number(event.target.value);
      if (event.target.value === "" || !(value >= least && value <= most) || (step === 1 && value % 1)) return;
      example[key] = value;
      drawExample();
    },
  }));
}

function beginExample(kind) {
  example.kind = kind;
  byId("example-controls").replaceChildren(
    numberInput("rows", "rows", 1, 8), numberInput("columns", "cols", 1, 32),
    numberInput("threads a block", "threads", 1, 16), numberInput("epsilon", "epsilon", 0, 1, "any"));
  drawExample();
}

function drawExample() {
  fillExample();
  byId("example").replaceChildren(...example.values.map(exampleRow));
}

function exampleRow(values, r) {
  const result = element("div"), write = () => result.replaceChildren(...exampleResult(values));
  const inputs = values.map((value, col) => element("label", {style: `border-color: ${colour(col % example.threads)}`},
    `x${col}: t${col % example.threads}`,
    element("input", {type: "number", step: "any", value, "aria-label": `row ${r}, column ${col}`, oninput: (event) => {
      values[col] = Number(event.target.value) || 0;
      write();
    }})));
  write();
  const heading = element("h3", {}, `Row ${r}: block ${r}`);
  return element("div", {className: "example-row"}, heading, element("div", {className: "values"}, ...inputs), result);
}

function exampleResult(values) {
  const {sums, y} = normaliseRow(values, example.threads, example.epsilon, example.kind);
  const rounds = sums.flatMap((sum) => [
    ...sum.rounds.map((partials, i) => element("div", {},
      i === 0 ? `${sum.what}, of each thread: ` : `round ${i}: `,
      ...partials.map((partial, t) => element("span", {className: "partial"}, `t${t} ${show(partial)}`)))),
    element("div", {}, element("strong", {}, sum.then)),
  ]);
  const written = y.map((value, col) => element("span", {
    className: "partial", style: `border-left: 4px solid ${colour(col % example.threads)}`,
  }, show(value)));
  return [...rounds, element("div", {}, "y: ", ...written)];
}
