// Axis and samples of a run's page, over chart.js.
if (data.axes.length > 1) segment("axis", data.axes.map(a => [a, SHORT[a]]), "step", value => { state.axis = value; });
const slider = document.getElementById("sample-step");
function browse() {
  const rows = data.samples[Number(slider.value)];
  document.getElementById("sample-number").textContent = `step ${rows.step}`;
  document.getElementById("sample-rows").innerHTML = rows.responses.map(r => `<article class="card sample"><header><span>reward ${digits(r.reward)}</span><span>${r.answer === null ? "" : `answer ${escape(r.answer)}`}</span></header><p>${escape(r.prompt)}</p><p class="said">${escape(r.completion)}</p></article>`).join("");
}
if (slider) {
  slider.addEventListener("input", browse);
  for (const [id, by] of [["sample-back", -1], ["sample-on", 1]]) document.getElementById(id).addEventListener("click", () => { slider.value = Number(slider.value) + by; browse(); });
  browse();
}
start();
