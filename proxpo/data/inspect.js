"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const tip = document.getElementById("tip");
const LIGHT = {zero: [238, 240, 243], up: [[150, 190, 240], [11, 87, 196]], down: [[248, 186, 146], [194, 65, 12]]};
const DARK = {zero: [33, 40, 50], up: [[38, 92, 158], [140, 198, 255]], down: [[140, 68, 28], [255, 178, 125]]};
const maps = [];
let scale = "shared";
let cursor = null;

const css = name => getComputedStyle(root).getPropertyValue(name).trim();
const mix = (a, b, t) => a.map((x, i) => Math.round(x + (b[i] - x) * t));
const palette = () => root.dataset.theme === "dark" ? DARK : LIGHT;
const plain = x => Math.abs(x) >= 1e-3 && Math.abs(x) < 1e4 ? String(+x.toPrecision(3)) : x.toExponential(1);
const digits = x => x === null ? "–" : x === 0 ? "0" : plain(x).replaceAll("-", "−");
const signed = x => (x > 0 ? "+" : "") + digits(x);
const percent = x => x === 0 ? "0%" : `${(100 * x).toFixed(x < .095 ? 1 : 0)}%`;

// Square root: gradients are heavy-tailed, and small ones should still be seen.
function colour(weight, top) {
  const p = palette(), t = top > 0 ? Math.min(1, Math.sqrt(Math.abs(weight) / top)) : 0;
  const [mid, end] = weight > 0 ? p.up : p.down;
  return t < .5 ? mix(p.zero, mid, 2 * t) : mix(mid, end, 2 * t - 1);
}
const rgb = c => `rgb(${c})`;
const ink = c => .3 * c[0] + .59 * c[1] + .11 * c[2] > 140 ? "#10151c" : "#fff";

function largest(method) {
  let top = 0;
  for (const row of method.weight) for (const w of row) if (w !== null) top = Math.max(top, Math.abs(w));
  return top;
}
data.methods.forEach(m => { m.top = largest(m); });
const shared = Math.max(...data.methods.map(m => m.top));
const topOf = method => scale === "shared" ? shared : method.top;

// Rows of one prompt stand together, under its name.
function layout() {
  const height = data.rows > 96 ? 6 : data.rows > 40 ? 14 : 24, gap = height > 6 ? 2 : 0;
  const seen = [...new Set(data.prompts)], heads = [], rows = [];
  let y = 0;
  for (const prompt of seen) {
    if (prompt !== "") { heads.push({prompt, y: y + 6}); y += 24; }
    data.prompts.forEach((p, row) => { if (p === prompt) { rows.push({row, y}); y += height + gap; } });
    y += 6;
  }
  return {height, heads, rows, total: y, at: new Map(rows.map(r => [r.row, r.y]))};
}
const plan = layout();

function build(method, index) {
  const grid = document.querySelector(`#m${index} .grid`);
  const [labels, wide, shares] = grid.children;
  labels.style.height = shares.style.height = `${plan.total}px`;
  for (const head of plan.heads) put(labels, "prompt", head.y, `prompt ${head.prompt}`).title = head.prompt;
  if (plan.height >= 12) for (const {row, y} of plan.rows) {
    const reward = data.rewards ? data.rewards[row] : null, adv = method.adv_row[row];
    const line = put(labels, "", y), pill = line.appendChild(document.createElement("span"));
    line.style.height = `${plan.height}px`;
    pill.className = "reward"; pill.textContent = digits(reward); pill.title = "reward";
    const a = line.appendChild(document.createElement("span"));
    a.textContent = `A ${signed(adv)}`; a.className = adv > 0 ? "up" : adv < 0 ? "down" : ""; a.title = "mean advantage";
    const share = put(shares, method.push[row] > 0 ? "up" : method.push[row] < 0 ? "down" : "", y);
    share.style.height = `${plan.height}px`;
    share.title = "share of the method's gradient";
    const bar = share.appendChild(document.createElement("i"));
    bar.style.width = `${Math.ceil(62 * method.share[row] / data.loudest)}px`;
    share.append(percent(method.share[row]));
  }
  const inner = wide.appendChild(document.createElement("div"));
  inner.className = "inner";
  const canvas = inner.appendChild(document.createElement("canvas"));
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${method.name}: weight of every token; arrow keys move from token to token`);
  const box = inner.appendChild(document.createElement("div"));
  box.className = "cursor";
  const map = {method, index, canvas, wide, inner, box, cell: 0};
  canvas.addEventListener("mousemove", e => point(map, e));
  canvas.addEventListener("mouseleave", leave);
  canvas.addEventListener("keydown", e => move(map, e));
  canvas.addEventListener("blur", leave);
  maps.push(map);
}
function put(parent, name, y, text = "") {
  const node = parent.appendChild(document.createElement("div"));
  node.className = name; node.style.top = `${y}px`; node.textContent = text;
  return node;
}

function draw(map) {
  const {method, canvas, inner} = map, width = map.wide.clientWidth;
  map.cell = Math.max(2, Math.min(56, Math.floor(width / data.cols)));
  const total = map.cell * data.cols, ratio = Math.min(devicePixelRatio || 1, 16000 / total);
  canvas.width = total * ratio; canvas.height = plan.total * ratio;
  canvas.style.width = inner.style.width = `${total}px`; canvas.style.height = `${plan.total}px`;
  const g = canvas.getContext("2d"), gap = map.cell > 5 ? 2 : 0, top = topOf(method), hatch = css("--hatch");
  const texts = data.tokens && map.cell >= 26 && plan.height >= 18;
  g.scale(ratio, ratio);
  g.font = `10.5px ${css("--mono")}`; g.textAlign = "center"; g.textBaseline = "middle"; g.strokeStyle = hatch;
  for (const {row, y} of plan.rows) for (let t = 0; t < data.cols; t++) {
    const w = method.weight[row][t];
    if (w === null) continue;
    const x = t * map.cell, size = map.cell - gap, fill = colour(w, top);
    g.fillStyle = rgb(fill);
    g.beginPath(); g.roundRect(x, y, size, plan.height, gap ? 3 : 0); g.fill();
    if (w === 0 && map.cell > 5) { g.beginPath(); g.moveTo(x + 3, y + plan.height - 3); g.lineTo(x + size - 3, y + 3); g.stroke(); }
    if (texts) { g.fillStyle = ink(fill); g.fillText(fit(g, data.tokens[row][t], size - 2), x + size / 2, y + plan.height / 2 + .5); }
  }
}
function fit(g, text, width) {
  if (g.measureText(text).width <= width) return text;
  while (text.length > 1 && g.measureText(text + "…").width > width) text = text.slice(0, -1);
  return text + "…";
}

function ramp() {
  const canvas = document.getElementById("ramp"), g = canvas.getContext("2d"), n = canvas.width;
  for (let x = 0; x < n; x++) {
    const u = 2 * (x + .5) / n - 1;
    g.fillStyle = rgb(colour(Math.sign(u) * u * u, 1)); g.fillRect(x, 0, 1, canvas.height);
  }
  document.getElementById("low").textContent = scale === "shared" ? signed(-shared) : "−max";
  document.getElementById("high").textContent = scale === "shared" ? signed(shared) : "+max";
}
function drawAll() { ramp(); maps.forEach(draw); place(); }

function point(map, e) {
  const box = map.canvas.getBoundingClientRect(), y = e.clientY - box.top;
  const line = plan.rows.find(r => y >= r.y && y < r.y + plan.height);
  const col = Math.floor((e.clientX - box.left) / map.cell);
  if (!line || col >= data.cols || data.mask[line.row][col] === "0") return leave();
  show(map, line.row, col, e.clientX, e.clientY);
}
function move(map, e) {
  const step = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[e.key];
  if (e.key === "Escape") return leave();
  if (!step) return;
  e.preventDefault();
  let line = cursor ? plan.rows.findIndex(r => r.row === cursor.row) : 0, col = cursor ? cursor.col : -1;
  line = Math.max(0, Math.min(plan.rows.length - 1, line + step[0]));
  const cells = data.mask[plan.rows[line].row], to = step[1] < 0 ? -1 : 1;
  for (col += step[1]; col >= 0 && col < data.cols && cells[col] === "0";) col += to;
  if (col < 0 || col >= data.cols) return;
  const box = map.canvas.getBoundingClientRect();
  show(map, plan.rows[line].row, col, box.left + (col + 1) * map.cell, box.top + plan.rows[line].y + plan.height);
}
function leave() { cursor = null; tip.hidden = true; place(); }
function place() {
  for (const map of maps) {
    map.box.style.display = cursor ? "block" : "none";
    if (!cursor) continue;
    map.box.style.left = `${cursor.col * map.cell - 2}px`; map.box.style.top = `${plan.at.get(cursor.row) - 2}px`;
    map.box.style.width = `${map.cell + 2}px`; map.box.style.height = `${plan.height + 4}px`;
  }
}
function show(map, row, col, x, y) {
  cursor = {row, col};
  place();
  tip.replaceChildren(...describe(map, row, col));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(x + 16, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 20 + box.height > innerHeight ? Math.max(6, y - box.height - 16) : y + 20}px`;
}
function describe(map, row, col) {
  const make = (tag, name, text = "") => Object.assign(document.createElement(tag), {className: name, textContent: text});
  const where = make("div", "where", `response ${row}, token ${col}` + (data.prompts[row] ? `, prompt ${data.prompts[row]}` : ""));
  let policy = `log π ${digits(data.logp[row][col])}`;
  if (data.log_ratio) {
    const d = data.log_ratio[row][col];
    policy += `, log-ratio ${signed(d)}, ratio ${digits(d === null ? null : Math.exp(d))}`;
  }
  const table = make("table", ""), body = table.createTBody();
  for (const m of data.methods) {
    const w = m.weight[row][col], line = body.insertRow();
    line.className = m === map.method ? "here" : "";
    const name = line.insertCell(), chip = name.appendChild(make("span", "chip"));
    chip.style.background = w === null ? "transparent" : rgb(colour(w, topOf(m)));
    name.append(m.name);
    line.insertCell().textContent = w === null ? "filtered out" : w === 0 ? "no gradient" : `weight ${signed(w)}`;
    const adv = Array.isArray(m.advantage[row]) ? m.advantage[row][col] : m.advantage[row];
    line.insertCell().textContent = `A ${signed(adv)}`;
  }
  const token = data.tokens ? [make("b", "token", data.tokens[row][col])] : [];
  return [...token, where, make("div", "", policy), table];
}

function theme(name) { root.dataset.theme = name; drawAll(); }
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", e => theme(e.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => theme(root.dataset.theme === "dark" ? "light" : "dark"));
for (const button of document.querySelectorAll("[data-scale]")) button.addEventListener("click", () => {
  scale = button.dataset.scale;
  for (const one of document.querySelectorAll("[data-scale]")) one.setAttribute("aria-pressed", String(one === button));
  drawAll();
});
let before = "light";
addEventListener("beforeprint", () => { before = root.dataset.theme; theme("light"); });
addEventListener("afterprint", () => theme(before));
addEventListener("resize", drawAll);
data.methods.forEach(build);
theme(dark.matches ? "dark" : "light");
