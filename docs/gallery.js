// Turns the list of docs/gallery.md into a grid with filters. Without this file it stays a list.
(() => {
  const list = [...document.querySelectorAll("ul")].find((ul) => ul.querySelector('li img[src*="pictures/"]'));
  if (!list || list.dataset.grid) return;
  list.dataset.grid = "yes";
  const style = document.createElement("style");
  style.textContent = `
    .gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: 1rem; margin: 0 !important; padding: 0; list-style: none; }
    .gallery > li { margin: 0 !important; padding: .6rem; border: 1px solid #8884; border-radius: .4rem; font-size: .7rem; line-height: 1.4; }
    .gallery > li[hidden] { display: none; }
    .gallery img { display: block; width: 100%; height: auto; margin-bottom: .3rem; }
    .gallery code { font-size: .6rem; opacity: .8; }
    .gallery strong { font-size: .85rem; }
    .filters { display: flex; flex-wrap: wrap; gap: .6rem; align-items: center; margin: 1rem 0; font-size: .75rem; }
    .filters select, .filters input { font: inherit; color: inherit; background: transparent; border: 1px solid #8888; border-radius: .3rem; padding: .3rem .5rem; }
    .filters option { color: #222; background: #fff; }
    .md-sidebar--secondary { display: none; }`;
  document.head.append(style);
  list.classList.add("gallery");
  const cards = [...list.children].map((item) => ({
    item,
    stages: [...item.querySelectorAll("code")].map((code) => code.textContent),
    text: item.textContent.toLowerCase(),
  }));
  const names = new Map();
  for (const card of cards)
    for (const stage of card.stages) {
      const kind = stage.split("=")[0];
      if (!names.has(kind)) names.set(kind, new Set());
      names.get(kind).add(stage);
    }
  const bar = document.createElement("div");
  bar.className = "filters";
  const select = document.createElement("select");
  select.setAttribute("aria-label", "stage");
  select.append(new Option("all stages", ""));
  for (const [kind, stages] of names) {
    const group = document.createElement("optgroup");
    group.label = kind;
    group.append(new Option(`${kind}: any`, `${kind}=`));
    for (const stage of [...stages].sort()) group.append(new Option(stage, stage));
    select.append(group);
  }
  const search = document.createElement("input");
  search.type = "search";
  search.placeholder = "name or word";
  search.setAttribute("aria-label", "name or word");
  const count = document.createElement("span");
  bar.append(select, search, count);
  list.before(bar);
  const show = () => {
    const wanted = select.value, word = search.value.trim().toLowerCase();
    let shown = 0;
    for (const card of cards) {
      const fits = card.stages.some((s) => (wanted.endsWith("=") ? s.startsWith(wanted) : !wanted || s === wanted));
      card.item.hidden = !(fits && card.text.includes(word));
      shown += card.item.hidden ? 0 : 1;
    }
    count.textContent = `${shown} of ${cards.length} methods`;
  };
  select.addEventListener("change", show);
  search.addEventListener("input", show);
  show();
})();
