// What the page shows first, and its self-test.

const data = JSON.parse(byId("data").textContent);
const errors = [];
window.addEventListener("error", (event) => report(event.message));

function report(error) {
  errors.push(error);
  document.body.dataset.selftest = `failed: ${errors.join("; ")}`;
  byId("selftest").textContent = `Self-test: ${errors.join("; ")}`;
  byId("selftest").className = "bad";
}

function showWay(shown) {
  for (const button of byId("ways").children)
    button.setAttribute("aria-pressed", String(button.dataset.way === shown.way));
  drawLaunch(shown);
  drawRuler(shown);
  drawTraffic(shown);
  beginMap(shown);
}

function begin() {
  byId("title").textContent = data.title;
  byId("runs").textContent = data.runs;
  byId("planned").hidden = !data.ways.length;
  byId("ways").replaceChildren(...data.ways.map((shown) => element("button", {
    type: "button", "data-way": shown.way, onclick: () => { play(false); showWay(shown); },
  }, shown.way)));
  wireMap();
  if (data.example) beginExample(data.example);
  else byId("by-hand").remove();
  const {wrong, walked} = selfTest();
  if (data.ways.length) showWay(data.ways[0]);
  if (wrong) return report(wrong);
  if (errors.length) return;
  document.body.dataset.selftest = "ok";
  document.body.dataset.walked = walked;
  byId("selftest").className = "ok";
  if (data.ways.length)
    byId("selftest").textContent = `Self-test: in each of ${walked} passes that were walked each element is read or `
      + "written exactly once.";
  else if (data.example) byId("selftest").textContent = "Self-test: the example is right.";
}

begin();
