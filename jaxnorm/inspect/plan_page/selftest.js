// Walks all passes of both directions: each element of the row has to be some thread's once, and the map Python's.

const WALKED = 1 << 22;  // columns of the longest row that is walked

function checkPass(pass) {
  const {tiling} = pass, seen = new Uint8Array(tiling.cols);
  let digest = 0;
  eachVector(tiling, (block, thread, vec, first, count) => {
    for (let column = first; column < first + count; ++column) ++seen[column];
    digest += (block * 7 + thread * 31 + vec * 101 + count) * ((first % 8191) + 1);
  });
  const wrong = seen.findIndex((times) => times !== 1);
  if (wrong >= 0) return `column ${wrong} comes ${seen[wrong]} times in ${pass.step} of ${pass.kernel}`;
  if (digest % 2 ** 32 !== pass.digest) return `the map of ${pass.step} of ${pass.kernel} is not Python's`;
  for (let i = 0; i < 1000; ++i) {
    const column = Math.floor((i * tiling.cols) / 1000), {block, thread, vec} = ownerOf(tiling, column);
    const first = firstColumn(tiling, block, thread, vec);
    const end = first + elementCount(tiling, block, first);
    if (column < first || column >= end) return `column ${column} has another owner`;
  }
  return "";
}

function checkExample() {
  for (const kind of ["rms", "layer"])
    for (const threads of [1, 3, 4, 7]) {
      const values = [3, -1, 4, 1, -5, 9, 2, 6], {mean, rstd, y} = normaliseRow(values, threads, 0.1, kind);
      const exactMean = kind === "layer" ? values.reduce((a, b) => a + b) / 8 : 0;
      const square = values.reduce((sum, value) => sum + (value - exactMean) ** 2, 0) / 8;
      const off = [mean - exactMean, rstd * Math.sqrt(square + 0.1) - 1];
      off.push(...y.map((value, i) => value - (values[i] - exactMean) * rstd));
      if (!off.every((difference) => Math.abs(difference) < 1e-12)) return "the example's sums are wrong";
    }
  return "";
}

// What is wrong, or how much was walked.
function selfTest() {
  let walked = 0;
  for (const shown of data.ways) {
    showWay(shown);
    for (let step = 0; shown.passes.length && step < steps.length; ++step)
      choose({step, block: 1e9, warp: 1e9, thread: 1e9});
    for (const pass of shown.passes) {
      if (pass.tiling.cols > WALKED) continue;
      const wrong = checkPass(pass);
      if (wrong) return {wrong: `${shown.way}: ${wrong}`, walked};
      ++walked;
    }
  }
  return {wrong: checkExample(), walked};
}
