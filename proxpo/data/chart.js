"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const tip = document.getElementById("tip");
const state = {armsOff: new Set(), seedsOff: new Set(), view: "mean", axis: "step"};
const index = new Map(data.places ? Object.entries(data.places) : data.arms.map((arm, i) => [arm, i]));  // decides colour, dash and marker
const DASHES = ["", "7 4", "2 3.5", "9 3 2 3", "12 4", "4 3", "1 3", "9 3 2 3 2 3"];
const AXES = {step: "step", samples: "samples", tokens: "tokens", seconds: "seconds"};
const SHORT = {step: "Steps", samples: "Samples", tokens: "Tokens", seconds: "Seconds"};

// ---- words and numbers
const escape = text => String(text).replace(/[&<>"]/g, c => `&#${c.charCodeAt(0)};`);
const minus = text => text.replaceAll("-", "−");
function digits(x, share) {
  if (x === null || x === undefined) return "–";
  if (share) return minus((100 * x).toFixed(1));
  const size = Math.abs(x);
  if (size === 0) return "0";
  if (size >= 1000) return minus(Math.round(x).toLocaleString("en"));
  return minus(size < 1e-3 ? x.toExponential(1) : String(+x.toPrecision(3)));
}
const withUnit = (x, share) => digits(x, share) + (share && x !== null ? " %" : "");
function ticks(low, high, about, least = 0) {
  const raw = Math.max((high - low) / about, least), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find(k => k * power >= raw * (1 - 1e-9)) * power, found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}
function powers(low, high) {
  const found = [];
  for (let p = Math.floor(low); p <= high; p++) for (const k of high - low > 2.5 ? [1] : [1, 3]) {
    if (Math.log10(k) + p >= low && Math.log10(k) + p <= high) found.push(k * 10 ** p);
  }
  return found;
}
function tickText(values, share) {
  const scaled = values.map(v => share ? 100 * v : v), gap = values.length > 1 ? Math.abs(scaled[1] - scaled[0]) : 1;
  const places = Math.max(0, Math.min(8, -Math.floor(Math.log10(gap) + 1e-9)));
  const top = Math.max(...scaled.map(Math.abs));
  return scaled.map(v => minus(top > 0 && top < 1e-3 ? v.toExponential(1) : v.toLocaleString("en", {minimumFractionDigits: places, maximumFractionDigits: places})));
}
function interpolate(xs, ys, x) {
  let low = 0, high = xs.length - 1;
  if (high < 0) return null;
  if (x <= xs[0]) return ys[0];
  if (x >= xs[high]) return ys[high];
  while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] <= x) low = mid; else high = mid; }
  return ys[low] + (ys[high] - ys[low]) * (x - xs[low]) / (xs[high] - xs[low]);
}

// ---- marks
const colour = arm => `var(--c${index.get(arm) % 8})`;
const form = arm => { const i = index.get(arm); return (i + Math.floor(i / 8)) % 8; };  // after eight arms colours come again
const dash = arm => { const d = DASHES[form(arm)]; return d ? ` stroke-dasharray="${d}"` : ""; };
function marker(arm, x, y, size = 4, hollow = false) {
  const i = form(arm), c = colour(arm), s = size, p = n => n.toFixed(1);
  const paint = hollow ? `fill="var(--panel)" stroke="${c}" stroke-width="2"` : `fill="${c}" stroke="var(--panel)" stroke-width="1"`;
  const shape = points => `<polygon points="${points.map(([a, b]) => `${p(x + a * s)},${p(y + b * s)}`).join(" ")}" ${paint}/>`;
  switch (i) {
    case 0: return `<circle cx="${p(x)}" cy="${p(y)}" r="${s}" ${paint}/>`;
    case 1: return shape([[-.9, -.9], [.9, -.9], [.9, .9], [-.9, .9]]);
    case 2: return shape([[0, -1.2], [1.1, .85], [-1.1, .85]]);
    case 3: return shape([[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]]);
    case 4: return shape([[0, 1.2], [1.1, -.85], [-1.1, -.85]]);
    case 5: return shape([[-.4, -1.2], [.4, -1.2], [.4, -.4], [1.2, -.4], [1.2, .4], [.4, .4], [.4, 1.2], [-.4, 1.2], [-.4, .4], [-1.2, .4], [-1.2, -.4], [-.4, -.4]]);
    case 6: return shape([[0, -1.2], [1.15, -.35], [.7, 1], [-.7, 1], [-1.15, -.35]]);
    default: return shape([[-1.2, 0], [.85, -1.1], [.85, 1.1]]);
  }
}
const swatch = arm => `<svg width="30" height="12" aria-hidden="true"><path d="M1 6H29" fill="none" stroke="${colour(arm)}" stroke-width="2.2"${dash(arm)}/>${marker(arm, 15, 6, 4)}</svg>`;
const swatchRow = arm => `<svg width="14" height="12" aria-hidden="true">${marker(arm, 7, 6, 4)}</svg> ${escape(arm)}`;
const shown = arm => !state.armsOff.has(arm);
const runShown = i => shown(data.runs[i].arm) && !state.seedsOff.has(String(data.runs[i].seed));

// ---- frames: axes and the map from values to pixels
function frame(fig, width, height, xs, ys, opts = {}) {
  const share = fig.share, pad = opts.pad ?? .06, bend = fig.log ? Math.log10 : y => y;
  let [y0, y1] = [bend(Math.min(...ys)), bend(Math.max(...ys))], [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  const floor = y0 >= 0 && !fig.log;
  if (y0 === y1) { const e = Math.abs(y0) * .1 || 1; y0 -= e; y1 += e; }
  y0 -= (y1 - y0) * pad; y1 += (y1 - y0) * pad;
  if (floor) y0 = Math.max(y0, 0);
  if (share) y1 = Math.min(y1, 1.005);
  if (x0 === x1) x1 = x0 + 1;
  if (opts.padX) { const e = (x1 - x0) * opts.padX; x0 = x0 >= 0 && x0 - e < 0 ? 0 - e * .3 : x0 - e; x1 += e; }
  const yTicks = fig.log ? powers(y0, y1) : ticks(y0, y1, height > 280 ? 6 : 4.5);
  const yText = fig.log ? yTicks.map(t => digits(t)) : tickText(yTicks, share);
  const left = 12 + Math.max(...yText.map(t => t.length)) * 6.6 + (share ? 10 : 0), right = 12, top = 10, bottom = 34;
  const X = x => left + (x - x0) / (x1 - x0) * (width - left - right);
  const Y = y => height - bottom - (bend(y) - y0) / (y1 - y0) * (height - top - bottom);
  let svg = yTicks.map((t, i) => `<line class="gridline" x1="${left}" x2="${width - right}" y1="${Y(t).toFixed(1)}" y2="${Y(t).toFixed(1)}"/><text x="${left - 7}" y="${(Y(t) + 4).toFixed(1)}" text-anchor="end">${yText[i]}${share ? " %" : ""}</text>`).join("");
  if (!opts.names) {
    const xTicks = ticks(x0, x1, Math.max(3, width / 110), opts.whole ? 1 : 0), xText = tickText(xTicks);
    svg += xTicks.map((t, i) => `<text x="${X(t).toFixed(1)}" y="${height - bottom + 17}" text-anchor="middle">${xText[i]}</text>`).join("");
  }
  svg += `<line class="base" x1="${left}" x2="${width - right}" y1="${height - bottom}" y2="${height - bottom}"/>`;
  svg += `<text x="${(left + width - right) / 2}" y="${height - 2}" text-anchor="middle">${escape(opts.label ?? fig.x)}</text>`;
  return {svg, X, Y, left, right: width - right, top, bottom: height - bottom};
}
const path = (xs, ys) => xs.map((x, i) => `${i ? "L" : "M"}${x.toFixed(1)} ${ys[i].toFixed(1)}`).join("");

// ---- the kinds of figure; each gives its drawing and the places that can be pointed at
function onAxis(clock, xs) {
  if (state.axis === "step") return xs;
  return clock && clock[state.axis] ? xs.map(x => interpolate(clock.step, clock[state.axis], x)) : null;
}
function curves(fig, width, height) {
  const means = [], singles = [];
  for (const line of fig.data) {
    if (!shown(line.arm)) continue;
    const clock = data.clocks[index.get(line.arm)], xs = onAxis(clock, line.x);
    if (state.view === "mean" && xs && line.x.length) means.push({...line, xs});
    else for (const one of line.runs) {
      const own = onAxis(data.runs[one.run].clock, one.x);
      if (runShown(one.run) && own && own.length) singles.push({...one, arm: line.arm, xs: own});
    }
  }
  if (!means.length && !singles.length) return null;
  const known = values => values.filter(v => v !== null);
  const ys = [...means.flatMap(l => [...l.mean, ...(l.raw ?? []), ...known(l.low), ...known(l.high)]), ...singles.flatMap(s => s.y)];
  const f = frame(fig, width, height, [...means, ...singles].flatMap(l => [l.xs[0], l.xs.at(-1)]), ys, {label: AXES[state.axis], whole: state.axis !== "seconds"});
  let svg = f.svg;
  for (const l of means) if (l.raw) svg += `<path class="trail" stroke="${colour(l.arm)}" d="${path(l.xs.map(f.X), l.raw.map(f.Y))}"/>`;
  for (const l of means) if (l.low[0] !== null) {
    const px = l.xs.map(f.X);
    svg += `<path class="band" fill="${colour(l.arm)}" d="${path(px, l.high.map(f.Y))}L${path(px.toReversed(), l.low.map(f.Y).toReversed()).slice(1)}Z"/>`;
  }
  for (const l of means) {
    const px = l.xs.map(f.X), py = l.mean.map(f.Y), every = px.length <= 30 ? 1 : Math.ceil(px.length / 9), shift = index.get(l.arm) % every;
    svg += `<path class="mean" stroke="${colour(l.arm)}"${dash(l.arm)} d="${path(px, py)}"/>`;
    px.forEach((x, i) => { if (i % every === shift % every || i === px.length - 1) svg += marker(l.arm, x, py[i], 3.6); });
  }
  for (const s of singles) {
    const failed = data.runs[s.run].status === "failed", px = s.xs.map(f.X), py = s.y.map(f.Y);
    svg += `<path class="one${failed ? " failed" : ""}" stroke="${colour(s.arm)}"${dash(s.arm)} d="${path(px, py)}"/>`;
    const x = px.at(-1), y = py.at(-1);
    svg += failed ? `<path d="M${x - 4} ${y - 4}l8 8m0-8l-8 8" stroke="var(--bad)" stroke-width="2.2"/>` : marker(s.arm, x, y, 3.4);
  }
  return {svg, frame: f, near: means.length ? "x" : "xy", targets: means.length ? meanTargets(fig, means, f) : runTargets(fig, singles, f), after: fig.legend ? legend(means) : ""};
}
const legend = lines => `<div class="parts">${lines.map(l => `<span>${swatch(l.arm)} ${escape(l.arm)}</span>`).join("")}</div>`;
function meanTargets(fig, means, f) {
  const places = new Map();
  for (const l of means) l.xs.forEach(x => places.set(Math.round(f.X(x)), x));
  return [...places].sort((a, b) => a[0] - b[0]).map(([px, x]) => {
    const rows = () => means.filter(l => x >= l.xs[0] - 1e-9 && x <= l.xs.at(-1) + 1e-9).map(l => {
      const at = ys => ys[0] === null ? null : interpolate(l.xs, ys, x);
      return {arm: l.arm, x, y: at(l.mean), low: at(l.low), high: at(l.high)};
    }).sort((a, b) => b.y - a.y);
    return {
      x: px, y: f.top, rows,
      marks: () => rows().map(r => [r.arm, f.X(r.x), f.Y(r.y)]),
      html: () => `<b>${AXES[state.axis]} ${digits(x)}</b><table>${rows().map(r => `<tr><td>${swatchRow(r.arm)}</td><td>${withUnit(r.y, fig.share)}</td><td>${r.low === null ? "" : `${digits(r.low, fig.share)} to ${digits(r.high, fig.share)}`}</td></tr>`).join("")}</table>`,
    };
  });
}
const runTargets = (fig, singles, f) => singles.flatMap(s => s.xs.map((x, i) => ({
  x: f.X(x), y: f.Y(s.y[i]), marks: () => [[s.arm, f.X(x), f.Y(s.y[i])]],
  html: () => `<b>${swatchRow(s.arm)}</b>${runName(s.run)}<table><tr><td>${AXES[state.axis]}</td><td>${digits(x)}</td></tr><tr><td>${escape(fig.y)}</td><td>${withUnit(s.y[i], fig.share)}</td></tr></table>`,
})));
const runName = i => (data.runs[i].seed === null ? "" : `, seed ${data.runs[i].seed}`) + (data.runs[i].status === "failed" ? ", failed" : "");

function cloud(fig, width, height) {
  const groups = fig.data.filter(g => shown(g.arm)).map(g => ({...g, points: g.points.filter(p => runShown(p.run)), trail: g.trail.filter(p => runShown(p.run))})).filter(g => g.points.length);
  if (!groups.length) return null;
  const every = state.view === "runs";
  const xs = groups.flatMap(g => [...g.points.map(p => p.x), ...(every ? g.trail.flatMap(t => t.x) : [])]);
  const ys = groups.flatMap(g => [...g.points.map(p => p.y), ...(every ? g.trail.flatMap(t => t.y) : [])]);
  const f = frame(fig, width, height, xs, ys, {padX: .06, pad: .09});
  let svg = f.svg + `<clipPath id="clip-${fig.key}"><rect x="${f.left}" y="${f.top}" width="${f.right - f.left}" height="${f.bottom - f.top}"/></clipPath>`;
  const all = groups.every(g => g.points.length === fig.data.find(o => o.arm === g.arm).points.length);
  for (const g of groups) if (all && g.hull.length > 1) {
    svg += `<path class="hull" fill="${colour(g.arm)}" stroke="${colour(g.arm)}" d="${path(g.hull.map(p => f.X(p[0])), g.hull.map(p => f.Y(p[1])))}Z"/>`;
  }
  for (const g of groups) for (const t of g.trail) svg += `<path class="trail" clip-path="url(#clip-${fig.key})" stroke="${colour(g.arm)}" d="${path(t.x.map(f.X), t.y.map(f.Y))}"/>`;
  for (const g of groups) for (const p of g.points) svg += marker(g.arm, f.X(p.x), f.Y(p.y), 5);
  const targets = groups.flatMap(g => g.points.map(p => ({
    x: f.X(p.x), y: f.Y(p.y), marks: () => [[g.arm, f.X(p.x), f.Y(p.y)]],
    html: () => `<b>${swatchRow(g.arm)}</b>${runName(p.run)}<table><tr><td>${escape(fig.y)}</td><td>${withUnit(p.y, fig.share)}</td></tr><tr><td>${escape(fig.x)}</td><td>${digits(p.x)}</td></tr></table>`,
  })));
  return {svg, frame: f, near: "xy", targets: targets.sort((a, b) => a.x - b.x)};
}

function means(fig, width, height) {
  const seen = fig.data.filter(s => shown(s.arm));
  if (!seen.length) return null;
  const groups = [...new Set(seen.filter(s => s.at).map(s => s.group))];
  const ys = seen.flatMap(s => [s.mean, s.low ?? s.mean, s.high ?? s.mean]);
  const f = frame(fig, width, height, [-.5, fig.ticks.length - .5], ys, {names: true, pad: .1});
  let svg = f.svg + fig.ticks.map((t, i) => `<text x="${f.X(i)}" y="${f.bottom + 17}" text-anchor="middle">${escape(t)}</text>`).join("");
  const targets = [], lead = new Map();
  for (const s of seen) if (s.at && !lead.has(s.group)) lead.set(s.group, s.arm);
  for (const s of seen.filter(s => !s.at)) {
    const y = f.Y(s.mean);
    if (s.low !== null) svg += `<rect class="band" fill="${colour(s.arm)}" x="${f.left}" width="${f.right - f.left}" y="${f.Y(s.high)}" height="${f.Y(s.low) - f.Y(s.high)}"/>`;
    svg += `<line x1="${f.left}" x2="${f.right}" y1="${y}" y2="${y}" stroke="${colour(s.arm)}" stroke-width="2" stroke-dasharray="6 4"/><text class="name" x="${f.right}" y="${y - 5}" text-anchor="end">${escape(s.group)}</text>`;
    targets.push({x: f.right - 20, y, marks: () => [], html: () => meanText(fig, s)});
  }
  groups.forEach((group, g) => {
    const own = seen.filter(s => s.group === group && s.at).map(s => ({...s, x: f.X(fig.ticks.indexOf(s.at)) + (g - (groups.length - 1) / 2) * 9})).sort((a, b) => a.x - b.x);
    const arm = lead.get(group);
    svg += `<path class="mean" stroke="${colour(arm)}"${dash(arm)} d="${path(own.map(s => s.x), own.map(s => f.Y(s.mean)))}"/>`;
    for (const s of own) {
      const y = f.Y(s.mean);
      if (s.low !== null) svg += `<line x1="${s.x}" x2="${s.x}" y1="${f.Y(s.low)}" y2="${f.Y(s.high)}" stroke="${colour(arm)}" stroke-width="1.6"/>`;
      if (s.chosen) svg += `<circle cx="${s.x}" cy="${y}" r="10" fill="none" stroke="${colour(arm)}" stroke-width="1.8"/>`;
      svg += marker(arm, s.x, y, 5);
      targets.push({x: s.x, y, marks: () => [[arm, s.x, y]], html: () => meanText(fig, s)});
    }
    const last = own.at(-1);
    if (groups.length > 1 || seen.some(s => !s.at)) svg += `<text class="name" x="${last.x + 12}" y="${f.Y(last.mean) + 4}">${escape(group)}</text>`;
  });
  return {svg, frame: f, near: "xy", targets: targets.sort((a, b) => a.x - b.x)};
}
const meanText = (fig, s) => `<b>${swatchRow(s.arm)}</b><table>${s.at ? `<tr><td>${escape(fig.x)}</td><td>${escape(s.at)}</td></tr>` : ""}<tr><td>${escape(fig.y)}</td><td>${withUnit(s.mean, fig.share)}</td></tr>${s.low === null ? "" : `<tr><td>95 % interval</td><td>${digits(s.low, fig.share)} to ${digits(s.high, fig.share)}</td></tr>`}${s.chosen ? "<tr><td>taken</td><td></td></tr>" : ""}</table>`;

function forest(fig, width) {
  const rows = fig.data.filter(r => shown(r.arm));
  if (!rows.length) return null;
  const bounds = [0, ...rows.flatMap(r => [r.low, r.high])], e = (Math.max(...bounds) - Math.min(...bounds)) * .06 || (fig.share ? .01 : 1);
  const [x0, x1] = [Math.min(...bounds) - e, Math.max(...bounds) + e], height = rows.length * 34 + 50;
  const left = 16 + Math.min(190, 36 + Math.max(...rows.map(r => r.arm.length)) * 7), right = width - 128;
  const X = x => left + (x - x0) / (x1 - x0) * (right - left), at = ticks(x0, x1, Math.max(1, Math.min(5, (right - left) / 48))), text = tickText(at, fig.share);
  let svg = at.map((t, i) => `<line class="${t === 0 ? "zero" : "gridline"}" x1="${X(t)}" x2="${X(t)}" y1="6" y2="${height - 36}"/><text x="${X(t)}" y="${height - 20}" text-anchor="middle">${t > 0 ? "+" : ""}${text[i]}</text>`).join("");
  svg += `<text x="${(left + right) / 2}" y="${height - 3}" text-anchor="middle">${escape(fig.x)}${fig.share ? ", points" : ""}</text>`;
  const sign = x => (x > 0 ? "+" : "") + digits(x, fig.share);
  const targets = rows.map((r, i) => {
    const y = 22 + i * 34, c = colour(r.arm);
    svg += `<text class="name" x="${left - 14}" y="${y + 4}" text-anchor="end">vs ${escape(r.arm)}</text><line x1="${X(r.low)}" x2="${X(r.high)}" y1="${y}" y2="${y}" stroke="${c}" stroke-width="1.8"/>`;
    for (const b of [r.low, r.high]) svg += `<line x1="${X(b)}" x2="${X(b)}" y1="${y - 5}" y2="${y + 5}" stroke="${c}" stroke-width="1.8"/>`;
    svg += `<line x1="${X(r.boot[0])}" x2="${X(r.boot[1])}" y1="${y}" y2="${y}" stroke="${c}" stroke-width="6" opacity=".4"/>` + marker(r.arm, X(r.mean), y, 5.5, !r.decides);
    svg += `<text class="name" x="${width - 6}" y="${y + 4}" text-anchor="end">${sign(r.mean)} [${digits(r.low, fig.share)}, ${digits(r.high, fig.share)}]</text>`;
    return {x: X(r.mean), y, marks: () => [], html: () => `<b>${escape(fig.title.split(" minus")[0])} − ${escape(r.arm)}</b><table><tr><td>difference</td><td>${sign(r.mean)}</td></tr><tr><td>Student's 95 %</td><td>${sign(r.low)} to ${sign(r.high)}</td></tr><tr><td>bootstrap 95 %</td><td>${sign(r.boot[0])} to ${sign(r.boot[1])}</td></tr><tr><td>paired seeds</td><td>${r.seeds}</td></tr></table>${r.decides ? "The interval excludes zero." : "No difference shown."}`};
  });
  return {svg, height, near: "xy", targets};
}

const TINTS = [100, 62, 36, 20, 12, 80, 50, 28];
const tint = i => `color-mix(in oklab, var(--accent) ${TINTS[i % 8]}%, var(--cell))`;
function bars(fig, width) {
  const rows = fig.data.filter(r => shown(r.arm));
  if (!rows.length) return null;
  const names = [...new Set(fig.data.flatMap(r => Object.keys(r.parts)))];
  const total = r => Object.values(r.parts).reduce((a, b) => a + b, 0), most = Math.max(...rows.map(total), 1e-12);
  const left = 16 + Math.min(190, 30 + Math.max(...rows.map(r => r.arm.length)) * 7), right = width - 70, height = rows.length * 30 + 40;
  const X = x => left + x / most * (right - left), at = ticks(0, most, 5), text = tickText(at);
  let svg = at.map((t, i) => `<line class="gridline" x1="${X(t)}" x2="${X(t)}" y1="4" y2="${height - 34}"/><text x="${X(t)}" y="${height - 19}" text-anchor="middle">${text[i]}</text>`).join("");
  svg += `<text x="${(left + right) / 2}" y="${height - 3}" text-anchor="middle">seconds per step</text>`;
  const targets = rows.map((r, i) => {
    const y = 6 + i * 30;
    let x = 0;
    names.forEach((name, n) => {
      const part = r.parts[name] ?? 0;
      svg += `<rect x="${X(x)}" y="${y}" width="${Math.max(0, X(x + part) - X(x))}" height="20" rx="2" fill="${tint(n)}"/>`;
      x += part;
    });
    svg += `<text class="name" x="${left - 10}" y="${y + 14}" text-anchor="end">${escape(r.arm)}</text><text class="name" x="${X(x) + 7}" y="${y + 14}">${digits(x)} s</text>`;
    return {x: X(x / 2), y: y + 10, marks: () => [], html: () => `<b>${escape(r.arm)}</b><table>${names.map(n => `<tr><td>${escape(n)}</td><td>${digits(r.parts[n] ?? null)} s</td></tr>`).join("")}</table>`};
  });
  const legend = `<div class="parts">${names.map((n, i) => `<span><i style="background:${tint(i)}"></i>${escape(n)}</span>`).join("")}</div>`;
  return {svg, height, near: "xy", targets, after: legend};
}

// ---- drawing and pointing
const KINDS = {curves, cloud, means, forest, bars};
const plots = data.figures.map(fig => ({fig, box: document.querySelector(`#fig-${fig.key} .plot`), words: document.querySelector(`#fig-${fig.key} .caption`)}));
function draw(plot) {
  const width = Math.max(280, plot.box.clientWidth), tall = plot.box.closest(".lead-figure") ? 350 : 262;
  const drawn = KINDS[plot.fig.kind](plot.fig, width, tall);
  plot.drawn = drawn;
  plot.at = -1;
  if (plot.fig.kind === "curves") plot.words.textContent = state.view === "mean" ? plot.fig.caption : "Each line is a run; × marks where one failed.";
  if (!drawn) { plot.box.innerHTML = `<p class="empty">Nothing selected has this.</p>`; return; }
  const height = drawn.height ?? tall;
  plot.box.innerHTML = `<svg viewBox="0 0 ${width} ${height}" tabindex="0" role="img" aria-label="${escape(plot.fig.title)}: ${escape(plot.fig.y || plot.fig.x)}. Arrow keys read the values.">${drawn.svg}<g class="over"></g></svg>${drawn.after ?? ""}`;
  const svg = plot.box.firstChild, scale = () => width / svg.getBoundingClientRect().width;
  svg.addEventListener("pointermove", e => {
    const box = svg.getBoundingClientRect(), x = (e.clientX - box.left) * scale(), y = (e.clientY - box.top) * scale();
    point(plot, nearest(drawn, x, y), e.clientX, e.clientY);
  });
  svg.addEventListener("pointerleave", () => leave(plot));
  svg.addEventListener("blur", () => leave(plot));
  svg.addEventListener("keydown", e => {
    const step = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1}[e.key];
    if (e.key === "Escape") leave(plot);
    if (!step) return;
    e.preventDefault();
    const next = Math.max(0, Math.min(drawn.targets.length - 1, plot.at + step)), box = svg.getBoundingClientRect(), t = drawn.targets[next];
    point(plot, next, box.left + t.x / scale(), box.top + t.y / scale());
  });
}
function nearest(drawn, x, y) {
  let best = -1, least = drawn.near === "x" ? 80 : 60;
  drawn.targets.forEach((t, i) => {
    const d = drawn.near === "x" ? Math.abs(t.x - x) : Math.hypot(t.x - x, t.y - y);
    if (d < least) { least = d; best = i; }
  });
  return best;
}
function point(plot, at, clientX, clientY) {
  if (at < 0) return leave(plot);
  const t = plot.drawn.targets[at], f = plot.drawn.frame, over = plot.box.querySelector(".over");
  if (at !== plot.at) {
    const line = plot.drawn.near === "x" ? `<line class="cross" x1="${t.x}" x2="${t.x}" y1="${f.top}" y2="${f.bottom}"/>` : "";
    over.innerHTML = line + t.marks().map(([arm, x, y]) => marker(arm, x, y, 6)).join("");
    tip.innerHTML = t.html();
    plot.at = at;
  }
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${clientX + 18 + box.width > innerWidth - 8 ? Math.max(6, clientX - box.width - 16) : clientX + 18}px`;
  tip.style.top = `${Math.max(6, Math.min(clientY + 14, innerHeight - box.height - 8))}px`;
}
function leave(plot) {
  plot.at = -1;
  tip.hidden = true;
  const over = plot.box.querySelector(".over");
  if (over) over.innerHTML = "";
}
const drawAll = () => plots.forEach(draw);

// ---- controls
function segment(id, options, chosen, set) {
  const box = document.getElementById(id);
  for (const [value, text] of options) {
    const button = box.querySelector(`[data-${id}="${value}"]`) ?? box.appendChild(Object.assign(document.createElement("button"), {type: "button", textContent: text}));
    button.dataset[id] = value;
    button.setAttribute("aria-pressed", String(value === chosen));
    button.addEventListener("click", () => {
      for (const one of box.children) one.setAttribute("aria-pressed", String(one === button));
      set(value);
      drawAll();
    });
  }
}
let waiting = 0;
// Called once the page has set its own controls up.
function start() {
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", async () => {
    const text = button.previousElementSibling;
    try { await navigator.clipboard.writeText(text.textContent); button.textContent = "Copied"; }
    catch { getSelection().selectAllChildren(text); button.textContent = "Selected"; }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    root.style.colorScheme = root.dataset.theme;
  });
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(drawAll, 80); });
  drawAll();
  root.dataset.ready = "yes";
}
