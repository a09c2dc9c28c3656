// Filters of the comparison page, over chart.js.
function chip(html, pressed, toggle) {
  const button = document.createElement("button");
  button.type = "button"; button.className = "chip"; button.innerHTML = html;
  button.setAttribute("aria-pressed", String(pressed));
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    toggle(on);
    filter();
  });
  return button;
}
function flip(set, key, on) { if (on) set.delete(key); else set.add(key); }
function filter() {
  for (const row of document.querySelectorAll("[data-arm]")) {
    const seed = row.dataset.seed;
    row.classList.toggle("off", !shown(row.dataset.arm) || (seed !== undefined && state.seedsOff.has(seed)));
  }
  drawAll();
}
document.getElementById("arms").append(...data.arms.map(arm => chip(`${swatch(arm)}${escape(arm)}`, true, on => flip(state.armsOff, arm, on))));
const seeds = [...new Set(data.runs.filter(r => r.role !== "tune" && r.seed !== null).map(r => r.seed))].sort((a, b) => a - b);
if (seeds.length > 1) document.getElementById("seeds").append(Object.assign(document.createElement("span"), {className: "what", textContent: "seeds"}), ...seeds.map(seed => {
  const button = chip(String(seed), true, on => {
    flip(state.seedsOff, String(seed), on);
    if (state.view === "mean") document.querySelector('[data-view="runs"]').click();
  });
  button.title = "A mean and its band are of all seeds: leaving one out shows every run instead";
  return button;
}));
segment("view", [["mean", ""], ["runs", ""]], "mean", value => { state.view = value; });
if (data.axes.length > 1) segment("axis", data.axes.map(a => [a, SHORT[a]]), "step", value => { state.axis = value; });

for (const one of document.querySelectorAll("[data-key]")) one.innerHTML = `<svg width="18" height="14" aria-hidden="true">${marker(one.dataset.key, 9, 7, 5)}</svg>`;
for (const head of document.querySelectorAll("th[data-column]")) head.firstElementChild.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0], column = Number(head.dataset.column);
  const down = head.getAttribute("aria-sort") !== "descending", rows = [...body.rows];
  const worth = row => { const v = row.cells[column].dataset.v; return v === "" ? (down ? -Infinity : Infinity) : Number(v); };
  rows.sort((a, b) => down ? worth(b) - worth(a) : worth(a) - worth(b));
  for (const other of head.closest("table").querySelectorAll("[aria-sort]")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...rows);
});
start();
